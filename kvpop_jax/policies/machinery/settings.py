"""What policies are made from, with the defaults that are documented for them."""

from dataclasses import dataclass

from kvpop_jax.errors import UserError
from kvpop_jax.scorers import Scorer


@dataclass(frozen=True)
class MethodSettings:
    """Hyper-parameters of the published methods. Shared where methods mean the same, so that they can be compared.

    Attributes:
        observed: last prompt tokens whose attention scores the rest and which always stay (SnapKV, PyramidKV, Ada-KV,
            CAKE).
        kernel: width of the average over neighbouring tokens (the same four).
        pyramid_beta: the last layer's share of the pool is about 1 / beta of the mean (PyramidKV).
        ada_floor: share of the budget that is split evenly between heads (Ada-KV).
        ada_width: slots per head that are allocated, in units of the mean (Ada-KV); what a head wins beyond goes to the
            others.
        cake_variance: weight of the variance over the observed queries (CAKE).
        future: positions ahead that queries are expected at (ExpectedAttention).
        recent_share: share of the budget that the most recent tokens hold (H2O, D2O).
        decay: what accumulated attention is multiplied by per step (Scissorhands); 1 forgets nothing.
        merged: tokens that a leaving value is spread over (CaM).
        rkv_observed: last queries that score (R-KV), which also stay.
        rkv_kernel: width of the maximum over neighbouring tokens (R-KV).
        rkv_importance: weight of attention against redundancy (R-KV).
        rkv_similarity: cosine above which a key is a near-duplicate (R-KV).
        rkv_interval: steps between compressions, and scratch slots (R-KV).
    """

    observed: int = 32
    kernel: int = 5
    pyramid_beta: float = 20.0
    ada_floor: float = 0.2
    ada_width: float = 4.0
    cake_variance: float = 200.0
    future: int = 512
    recent_share: float = 0.5
    decay: float = 1.0
    merged: int = 32
    rkv_observed: int = 8
    rkv_kernel: int = 7
    rkv_importance: float = 0.1
    rkv_similarity: float = 0.5
    rkv_interval: int = 128

    def __post_init__(self) -> None:
        for name in ("observed", "future", "merged", "rkv_observed", "rkv_interval"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("kernel", "rkv_kernel"):
            if getattr(self, name) < 1 or getattr(self, name) % 2 == 0:
                raise UserError(f"{name} must be an odd number, not {getattr(self, name)}")
        for name in ("ada_floor", "recent_share", "rkv_importance"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        if not 0 < self.decay <= 1:
            raise UserError(f"decay must be above 0 and at most 1, not {self.decay}")
        for name in ("pyramid_beta", "ada_width"):
            if not getattr(self, name) >= 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class PolicySettings:
    """What a policy is made from; each takes what it needs.

    Attributes:
        sinks: first tokens that never leave, where the policy keeps sinks.
        window: most recent tokens that never leave, the query included, where the policy has a window.
        scorer: of the learned policies.
        methods: hyper-parameters of the published methods.
    """

    sinks: int = 4
    window: int = 256
    scorer: Scorer | None = None
    methods: MethodSettings = MethodSettings()

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise UserError(f"sinks must not be negative, as {self.sinks} is")
        if self.window < 1:
            raise UserError(f"window must be at least 1 (a query sees itself), not {self.window}")
