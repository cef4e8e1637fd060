"""The suite every back end of `decode_attention` runs; the judge is a masked softmax in NumPy, in float64."""

from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import assert_close

from pallas_kernels.backend import BackendError
from pallas_kernels.decode_attention import decode_attention


@dataclass(frozen=True)
class Case:
    batch: int
    kv_heads: int
    group: int
    slots: int
    head_dim: int = 64


CASES = {
    "one_slot": Case(batch=1, kv_heads=1, group=1, slots=1),
    "group_3": Case(batch=3, kv_heads=2, group=3, slots=7),
    "group_4": Case(batch=2, kv_heads=2, group=4, slots=129),
    "group_8_dim_128": Case(batch=3, kv_heads=1, group=8, slots=200, head_dim=128),
}


class DecodeAttentionSuite:
    """Subclass it and name the back end."""

    backend: str
    dtype: str = "float64"
    """The widest dtype the back end computes in."""
    tolerance: float = 1e-13
    """Largest error in that dtype, as a share of the largest entry."""

    @pytest.mark.core
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_it_is_a_softmax_over_the_occupied_slots_after_the_write(self, case, float64):
        x = random_inputs(case, self.dtype)
        o_BHD, lse_BH, k_BKCD, v_BKCD, p_BHC = run(self.backend, x)
        wanted = expected(x)
        assert lse_BH.dtype == p_BHC.dtype == jnp.promote_types(self.dtype, jnp.float32)
        assert_close(o_BHD, wanted.o_BHD, self.tolerance)
        assert_close(lse_BH, wanted.lse_BH, self.tolerance)
        assert_close(p_BHC, wanted.p_BHC, self.tolerance)
        np.testing.assert_array_equal(k_BKCD, wanted.k_BKCD)
        np.testing.assert_array_equal(v_BKCD, wanted.v_BKCD)

    @pytest.mark.core
    def test_a_slot_past_the_end_writes_nothing(self, float64):
        x = random_inputs(CASES["group_3"], self.dtype)
        x.slot_BK[:] = [[7, 3], [100, 7], [0, 2**31 - 1]]
        _, _, k_BKCD, v_BKCD, _ = run(self.backend, x)
        for b, kv in ((0, 0), (1, 0), (1, 1), (2, 1)):
            np.testing.assert_array_equal(k_BKCD[b, kv], x.k_BKCD[b, kv])
            np.testing.assert_array_equal(v_BKCD[b, kv], x.v_BKCD[b, kv])
        np.testing.assert_array_equal(k_BKCD[0, 1, 3], x.k_new_BKD[0, 1])
        np.testing.assert_array_equal(v_BKCD[2, 0, 0], x.v_new_BKD[2, 0])

    @pytest.mark.core
    def test_a_row_of_empty_slots_gets_zero_and_minus_infinity(self, float64):
        x = random_inputs(CASES["group_3"], self.dtype)
        x.position_BKC[1, 0] = -1
        o_BHD, lse_BH, _, _, p_BHC = run(self.backend, x)
        empty_H = np.arange(6) < 3
        assert not np.any(o_BHD[1, empty_H]) and not np.any(p_BHC[1, empty_H])
        assert np.array_equal(np.isneginf(lse_BH[1]), empty_H)
        assert np.all(np.isfinite(lse_BH[[0, 2]]))

    def test_what_lies_in_an_empty_slot_does_not_matter(self, float64):
        x = random_inputs(CASES["group_4"], self.dtype)
        empty_BKC1 = (x.position_BKC < 0)[..., None]
        far = x.k_BKCD.dtype.type(1e3)
        other = replace(x, k_BKCD=np.where(empty_BKC1, far, x.k_BKCD), v_BKCD=np.where(empty_BKC1, -far, x.v_BKCD))
        for got, wanted in zip(run(self.backend, other)[:2], run(self.backend, x)[:2], strict=True):
            np.testing.assert_array_equal(got, wanted)

    @pytest.mark.core
    def test_slots_may_stand_in_any_order(self, float64):
        x = random_inputs(CASES["group_4"], self.dtype)
        order_C = np.random.default_rng(1).permutation(129)
        moved = replace(
            x,
            k_BKCD=x.k_BKCD[:, :, order_C], v_BKCD=x.v_BKCD[:, :, order_C], position_BKC=x.position_BKC[:, :, order_C],
            slot_BK=np.argsort(order_C)[x.slot_BK].astype(np.int32),
        )  # fmt: skip
        o_BHD, lse_BH, k_BKCD, _, p_BHC = run(self.backend, x)
        moved_o_BHD, moved_lse_BH, moved_k_BKCD, _, moved_p_BHC = run(self.backend, moved)
        assert_close(moved_o_BHD, o_BHD, self.tolerance)
        assert_close(moved_lse_BH, lse_BH, self.tolerance)
        assert_close(moved_p_BHC, p_BHC[..., order_C], self.tolerance)
        np.testing.assert_array_equal(moved_k_BKCD, k_BKCD[:, :, order_C])

    def test_probabilities_are_returned_only_when_asked_for(self, float64):
        x = random_inputs(CASES["group_3"], self.dtype)
        o_BHD, lse_BH, _, _, p_BHC = run(self.backend, x, return_probabilities=False)
        wanted = expected(x)
        assert p_BHC is None
        assert_close(o_BHD, wanted.o_BHD, self.tolerance)
        assert_close(lse_BH, wanted.lse_BH, self.tolerance)

    def test_bfloat16_stays_within_its_rounding(self):
        """p and o are each rounded by at most 2^-9 of the largest value; log-sum-exp and probabilities are float32."""
        x = random_inputs(CASES["group_8_dim_128"], "bfloat16")
        o_BHD, lse_BH, k_BKCD, _, p_BHC = run(self.backend, x)
        wanted = expected(x)
        assert o_BHD.dtype == k_BKCD.dtype == jnp.bfloat16 and lse_BH.dtype == p_BHC.dtype == jnp.float32
        assert np.max(np.abs(o_BHD.astype(np.float64) - wanted.o_BHD)) <= 2**-8 * np.max(np.abs(wanted.v_BKCD))
        assert_close(lse_BH, wanted.lse_BH, 2**-18)
        assert_close(p_BHC, wanted.p_BHC, 2**-18)

    @pytest.mark.core
    def test_donated_caches_are_written_in_place(self):
        x = random_inputs(CASES["group_4"], "float32")
        memory = _compiled(self.backend, True).lower(*x.arguments).compile().memory_analysis()
        caches = x.k_BKCD.nbytes + x.v_BKCD.nbytes
        assert memory.alias_size_in_bytes >= caches
        assert memory.temp_size_in_bytes < caches // 2, "the cache is copied on the way"

    def test_an_unknown_back_end_is_refused(self):
        x = random_inputs(CASES["one_slot"], "float32")
        with pytest.raises(BackendError, match="nonesuch"):
            decode_attention(*x.arguments, backend="nonesuch")


@dataclass(frozen=True)
class Inputs:
    """One problem, in the order of the arguments."""

    q_BHD: np.ndarray
    k_BKCD: np.ndarray
    v_BKCD: np.ndarray
    position_BKC: np.ndarray
    k_new_BKD: np.ndarray
    v_new_BKD: np.ndarray
    slot_BK: np.ndarray

    @property
    def arguments(self) -> tuple[np.ndarray, ...]:
        return tuple(vars(self).values())


@dataclass(frozen=True)
class Expected:
    o_BHD: np.ndarray
    lse_BH: np.ndarray
    k_BKCD: np.ndarray
    v_BKCD: np.ndarray
    p_BHC: np.ndarray


def random_inputs(case: Case, dtype: str) -> Inputs:
    """About a third of the slots is empty; the slot that is written never is."""
    B, K, H, C, D = case.batch, case.kv_heads, case.kv_heads * case.group, case.slots, case.head_dim
    rng = np.random.default_rng(B * 10000 + H * 1000 + C)

    def normal(*shape):
        return rng.normal(size=shape).astype(jnp.dtype(dtype))

    position_BKC = np.where(rng.random((B, K, C)) < 0.3, -1, rng.permuted(np.tile(np.arange(C), (B, K, 1)), axis=-1))
    slot_BK = rng.integers(0, C, (B, K)).astype(np.int32)
    np.put_along_axis(position_BKC, slot_BK[..., None], C, axis=-1)
    return Inputs(
        q_BHD=normal(B, H, D) * 2, k_BKCD=normal(B, K, C, D), v_BKCD=normal(B, K, C, D),
        position_BKC=position_BKC.astype(np.int32), k_new_BKD=normal(B, K, D), v_new_BKD=normal(B, K, D),
        slot_BK=slot_BK,
    )  # fmt: skip


def expected(x: Inputs) -> Expected:
    """Row by row and head by head."""
    (B, H, D), (K, C) = x.q_BHD.shape, x.k_BKCD.shape[1:3]
    k_BKCD, v_BKCD = x.k_BKCD.copy(), x.v_BKCD.copy()
    for b, kv in np.ndindex(B, K):
        k_BKCD[b, kv, x.slot_BK[b, kv]] = x.k_new_BKD[b, kv]
        v_BKCD[b, kv, x.slot_BK[b, kv]] = x.v_new_BKD[b, kv]
    o_BHD, lse_BH, p_BHC = np.zeros((B, H, D)), np.zeros((B, H)), np.zeros((B, H, C))
    for b, h in np.ndindex(B, H):
        kv = h // (H // K)
        here = x.position_BKC[b, kv] >= 0
        keys, values = (cache[b, kv, here].astype(np.float64) for cache in (k_BKCD, v_BKCD))
        score = keys @ x.q_BHD[b, h].astype(np.float64) / np.sqrt(D)
        lse_BH[b, h] = np.log(np.exp(score - score.max()).sum()) + score.max()
        p_BHC[b, h, here] = np.exp(score - lse_BH[b, h])
        o_BHD[b, h] = p_BHC[b, h, here] @ values
    return Expected(o_BHD, lse_BH, k_BKCD, v_BKCD, p_BHC)


def run(backend: str, x: Inputs, return_probabilities: bool = True):
    return jax.tree.map(np.asarray, _compiled(backend, return_probabilities)(*x.arguments))


@cache
def _compiled(backend: str, return_probabilities: bool):
    def run(*arguments):
        return decode_attention(*arguments, return_probabilities=return_probabilities, backend=backend)

    return jax.jit(run, donate_argnums=(1, 2))
