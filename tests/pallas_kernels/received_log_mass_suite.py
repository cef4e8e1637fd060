"""The suite every back end of `received_log_mass` runs; the judge is NumPy, in float64, with a map of probabilities."""

from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import (
    assert_close,
    dense_lse,
    dense_scores,
    largest_intermediate,
    same_segment,
    segment_rows,
    visibility,
)

from pallas_kernels.backend import BackendError
from pallas_kernels.received_log_mass import received_log_mass


@dataclass(frozen=True)
class Case:
    """Sizes of one random problem; `lengths` are the documents of each row, negative for padding."""

    lengths: tuple[tuple[int, ...], ...]
    length: int
    delay: int
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    every: int | None = None
    """Share of the queries sampled, one in this many; None passes no subset."""


CASES = {
    "one_token": Case(((1,),), 1, delay=0),
    "seven_tokens_group_3": Case(((7,), (3, 4)), 7, delay=2, kv_heads=2, group=3),
    "one_block_group_4_delay_0": Case(((128,),), 128, delay=0, group=4),
    "one_past_a_block_some_queries": Case(((129,), (60, -9, 60)), 129, delay=16, kv_heads=2, every=3),
    "two_ragged_blocks_group_8_dim_128": Case(
        ((200,), (-3, 90, 100, -7)), 200, delay=64, group=8, head_dim=128, every=2
    ),
    "delay_longer_than_the_documents": Case(((129,), (60, -9, 60)), 129, delay=60, kv_heads=2, every=3),
}


class ReceivedLogMassSuite:
    """Subclass it and name the back end."""

    backend: str
    dtype: str = "float64"
    """The widest dtype the back end computes in."""
    tolerance: float = 1e-12
    """Largest error in that dtype, as a share of the largest entry."""

    @pytest.mark.core
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_it_is_the_log_of_the_summed_probabilities(self, case, float64):
        x = random_inputs(case, self.dtype)
        mass_BHS = run(self.backend, x)
        assert mass_BHS.dtype == jnp.promote_types(self.dtype, jnp.float32)
        with np.errstate(divide="ignore"):
            wanted_BHS = np.log(summed_probabilities(x, x.lse_BHT))
        assert_close(mass_BHS, wanted_BHS, self.tolerance)

    @pytest.mark.core
    def test_keys_that_no_query_reaches_receive_minus_infinity(self, float64):
        x = random_inputs(CASES["delay_longer_than_the_documents"], self.dtype)
        mass_BHS = run(self.backend, x)
        asks_T = np.nonzero(x.query_BT[0])[0]
        reached_S = np.arange(129) + 60 <= asks_T.max()
        assert np.array_equal(np.isfinite(mass_BHS[0, 0]), reached_S)
        assert np.all(np.isneginf(mass_BHS[1]))

    @pytest.mark.core
    @pytest.mark.parametrize("name", ["one_past_a_block_some_queries", "two_ragged_blocks_group_8_dim_128"])
    def test_with_the_lse_of_a_sparse_pass_each_query_weighs_one_over_its_kept_mass(self, name, float64):
        case = CASES[name]
        x = random_inputs(case, self.dtype)
        # Every key lives for a few steps, so that most of what the later queries would see is gone.
        t_S = np.arange(case.length)
        expiry_BKS = t_S + np.random.default_rng(0).integers(1, 9, (len(case.lengths), case.kv_heads, case.length))
        visible_BKTS = visibility(expiry_BKS, x.segment_BS)
        sparse_lse_BHT = dense_lse(x.q_BTHD, x.k_BSKD, visible_BKTS).astype(x.lse_BHT.dtype)
        p_BHTS = np.exp(_causal_scores(x) - np.where(np.isfinite(x.lse_BHT), x.lse_BHT, 0)[..., None])
        kept_BHT = (p_BHTS * np.repeat(visible_BKTS, case.group, axis=1)).sum(-1)
        assert kept_BHT[np.isfinite(x.lse_BHT)].min() < 1e-3, "the case must have queries that lost nearly everything"
        with np.errstate(divide="ignore"):
            p_over_kept_BHTS = np.where(kept_BHT > 0, 1 / kept_BHT, 0)[..., None] * p_BHTS
            wanted_BHS = np.log(np.where(counted(x), p_over_kept_BHTS, 0).sum(2))
        assert_close(run(self.backend, replace(x, lse_BHT=sparse_lse_BHT)), wanted_BHS, 10 * self.tolerance)

    def test_a_query_whose_lse_is_minus_infinity_does_not_count(self, float64):
        x = random_inputs(CASES["one_past_a_block_some_queries"], self.dtype)
        blind_T = np.arange(129) % 5 == 0
        lse_BHT = np.where(blind_T, -np.inf, x.lse_BHT).astype(x.lse_BHT.dtype)
        as_if_not_asked = replace(x, query_BT=x.query_BT & ~blind_T)
        assert_close(run(self.backend, replace(x, lse_BHT=lse_BHT)), run(self.backend, as_if_not_asked), 0)

    def test_terms_far_above_one_do_not_overflow(self, float64):
        x = random_inputs(CASES["one_past_a_block_some_queries"], self.dtype)
        shifted = replace(x, lse_BHT=x.lse_BHT - 5000)
        wanted_BHS = run(self.backend, x).astype(np.float64) + 5000
        assert_close(run(self.backend, shifted), wanted_BHS, max(self.tolerance, np.finfo(x.lse_BHT.dtype).eps))

    @pytest.mark.core
    def test_no_gradient_flows(self):
        x = random_inputs(CASES["seven_tokens_group_3"], self.dtype)

        def total(q_BTHD, k_BSKD, lse_BHT):
            mass_BHS = received_log_mass(q_BTHD, k_BSKD, lse_BHT, x.segment_BS, delay=2, backend=self.backend)
            return jnp.where(jnp.isfinite(mass_BHS), mass_BHS, 0).sum()

        for gradient in jax.grad(total, argnums=(0, 1, 2))(x.q_BTHD, x.k_BSKD, x.lse_BHT):
            assert not np.any(gradient)

    def test_bfloat16_inputs_are_multiplied_without_rounding(self):
        """Products of bfloat16 are exact in float32, so that only the float32 sums remain."""
        x = random_inputs(CASES["two_ragged_blocks_group_8_dim_128"], "bfloat16")
        mass_BHS = run(self.backend, x)
        assert mass_BHS.dtype == jnp.float32
        with np.errstate(divide="ignore"):
            assert_close(mass_BHS, np.log(summed_probabilities(x, x.lse_BHT)), 2**-18)

    @pytest.mark.core
    def test_nothing_of_the_size_of_the_attention_map_is_made(self):
        S, H, K, D = 2048, 2, 1, 64
        shapes = [((1, S, H, D), "float32"), ((1, S, K, D), "float32"), ((1, H, S), "float32"), ((1, S), "int32")]

        def mass(*arguments):
            return received_log_mass(*arguments, delay=256, backend=self.backend)

        assert largest_intermediate(mass, *[jax.ShapeDtypeStruct(*shape) for shape in shapes]) < S * S

    def test_an_unknown_back_end_is_refused(self):
        x = random_inputs(CASES["one_token"], "float32")
        with pytest.raises(BackendError, match="nonesuch"):
            received_log_mass(x.q_BTHD, x.k_BSKD, x.lse_BHT, x.segment_BS, delay=0, backend="nonesuch")


@dataclass(frozen=True)
class Inputs:
    """One problem, normalised by a dense pass."""

    q_BTHD: np.ndarray
    k_BSKD: np.ndarray
    lse_BHT: np.ndarray
    segment_BS: np.ndarray
    query_BT: np.ndarray | None
    delay: int


def random_inputs(case: Case, dtype: str) -> Inputs:
    segment_BS = segment_rows([list(row) for row in case.lengths], case.length)
    (B, S), K, H, D = segment_BS.shape, case.kv_heads, case.kv_heads * case.group, case.head_dim
    rng = np.random.default_rng(S * 1000 + H * 10 + D)
    # Scores of deviation 3: some keys take most of a query's attention.
    q_BTHD = rng.normal(size=(B, S, H, D), scale=3).astype(jnp.dtype(dtype))
    k_BSKD = rng.normal(size=(B, S, K, D)).astype(jnp.dtype(dtype))
    causal_BKTS = visibility(np.full((B, K, S), S), segment_BS)
    lse_BHT = dense_lse(q_BTHD, k_BSKD, causal_BKTS).astype(jnp.promote_types(dtype, jnp.float32))
    query_BT = None if case.every is None else rng.integers(0, case.every, (B, S)) == 0
    return Inputs(q_BTHD, k_BSKD, lse_BHT, segment_BS, query_BT, case.delay)


def counted(x: Inputs) -> np.ndarray:
    """`[B, 1, T, S]`: pairs of a query and a key that it is late enough to count for."""
    t_S = np.arange(x.segment_BS.shape[1])
    pairs_BTS = same_segment(x.segment_BS) & (t_S[:, None] >= t_S + x.delay)
    return (pairs_BTS if x.query_BT is None else pairs_BTS & x.query_BT[:, :, None])[:, None]


def summed_probabilities(x: Inputs, lse_BHT: np.ndarray) -> np.ndarray:
    """`[B, H, S]`: the map of probabilities, masked to the pairs that count, summed over the queries."""
    lse_BHT = np.where(np.isfinite(lse_BHT), lse_BHT, 0).astype(np.float64)
    return np.where(counted(x), np.exp(_causal_scores(x) - lse_BHT[..., None]), 0).sum(2)


def _causal_scores(x: Inputs) -> np.ndarray:
    t_S = np.arange(x.segment_BS.shape[1])
    causal_BTS = same_segment(x.segment_BS) & (t_S[:, None] >= t_S)
    return np.where(causal_BTS[:, None], dense_scores(x.q_BTHD, x.k_BSKD), -np.inf)


def run(backend: str, x: Inputs) -> np.ndarray:
    return np.asarray(_compiled(backend, x.delay)(x.q_BTHD, x.k_BSKD, x.lse_BHT, x.segment_BS, x.query_BT))


@cache
def _compiled(backend: str, delay: int):
    @jax.jit
    def run(q_BTHD, k_BSKD, lse_BHT, segment_BS, query_BT):
        return received_log_mass(q_BTHD, k_BSKD, lse_BHT, segment_BS, delay=delay, query_BT=query_BT, backend=backend)

    return run
