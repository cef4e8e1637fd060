from functools import partial

import jax
import numpy as np
import pytest
from eviction_oracles import Problem, deleting_cache
from oracles import assert_close, largest_intermediate, segment_rows, visibility

from kvpop_jax.eviction import compacted_attention
from kvpop_jax.eviction.compaction import survivors
from pallas_kernels.masked_attention import NEVER, masked_attention

B, S, H, K, D = 2, 50, 4, 2, 8
SINKS, WINDOW, POOL = 2, 5, 6
BUDGET = SINKS + WINDOW + POOL
SEGMENT_BS = segment_rows([[50], [20, -5, 3, 17]], S)


def random_inputs(dtype: str = "float64"):
    """(q, k, v), their expiry under a rule capped at BUDGET, cotangents of o and lse."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    problem = Problem(SEGMENT_BS, np.zeros((B, S), bool), SINKS, WINDOW, np.full(B, POOL, np.int32))
    visible_BKTS = deleting_cache(normal(B, K, S), problem)
    expiry_BKS = (np.arange(S) + visible_BKTS.sum(2)).astype(np.int32)
    qkv, cotangents = [normal(B, S, heads, D) for heads in (H, K, K)], [normal(B, S, H, D), normal(B, H, S)]
    return qkv, expiry_BKS, tuple(cotangents)


@jax.jit
def masked(qkv, expiry_BKS, cotangents):
    outputs, pull = jax.vjp(lambda *qkv: masked_attention(*qkv, expiry_BKS, SEGMENT_BS), *qkv)
    return outputs, pull(cotangents)


@jax.jit
def compacted(qkv, expiry_BKS, cotangents):
    def attend(*qkv):
        o_BTHD, lse_BHT, fits = compacted_attention(*qkv, expiry_BKS, SEGMENT_BS, chunk=16, capacity=BUDGET)
        return (o_BTHD, lse_BHT), fits

    outputs, pull, fits = jax.vjp(attend, *qkv, has_aux=True)
    return outputs, pull(cotangents), fits


@pytest.mark.core
def test_it_is_masked_attention_with_its_gradients(float64):
    outputs, gradients, fits = compacted(*random_inputs())
    wanted_outputs, wanted_gradients = masked(*random_inputs())
    assert fits
    for got, wanted in zip((*outputs, *gradients), (*wanted_outputs, *wanted_gradients), strict=True):
        assert_close(got, wanted, 1e-13)


@pytest.mark.parametrize("chunk", [1, 64])
def test_the_chunk_does_not_matter(chunk, float64):
    qkv, expiry_BKS, cotangents = random_inputs()
    run = jax.jit(partial(compacted_attention, chunk=chunk, capacity=BUDGET))
    o_BTHD, lse_BHT, fits = run(*qkv, expiry_BKS, SEGMENT_BS)
    (wanted_o_BTHD, wanted_lse_BHT), _ = masked(qkv, expiry_BKS, cotangents)
    assert fits
    assert_close(o_BTHD, wanted_o_BTHD, 1e-13)
    assert_close(lse_BHT, wanted_lse_BHT, 1e-13)


@pytest.mark.core
def test_overflow_is_reported_and_only_overflow(float64):
    qkv, _, cotangents = random_inputs()
    rng = np.random.default_rng(1)
    seen = set()
    for mean_life in (2, 6, 9, 12, 16, 40):
        expiry_BKS = (np.arange(S) + rng.geometric(1 / mean_life, (B, K, S))).astype(np.int32)
        visible_BKTS = visibility(expiry_BKS, SEGMENT_BS)
        alive = max(visible_BKTS[:, :, first, :first].sum(-1).max() for first in range(0, S, 16))
        fits = bool(compacted(qkv, expiry_BKS, cotangents)[2])
        assert fits == (alive <= BUDGET)
        seen.add(fits)
    assert seen == {True, False}
    assert not compacted(qkv, np.full((B, K, S), NEVER, np.int32), cotangents)[2]


def test_a_query_that_sees_nothing_gets_zero_and_no_gradient(float64):
    qkv, expiry_BKS, cotangents = random_inputs()
    # Row 0: every key expires before it is seen. Row 1: padding sees nothing.
    expiry_BKS = np.where(np.arange(B)[:, None, None] == 0, 0, expiry_BKS).astype(np.int32)
    (o_BTHD, lse_BHT), gradients, _ = compacted(qkv, expiry_BKS, cotangents)
    blind_BT = (SEGMENT_BS == 0) | np.array([[True], [False]])
    assert not np.any(np.asarray(o_BTHD)[blind_BT])
    assert np.all(np.isneginf(np.swapaxes(lse_BHT, 1, 2)[blind_BT]))
    for gradient in gradients:
        assert np.all(np.isfinite(gradient)) and not np.any(np.asarray(gradient)[blind_BT])


def test_survivors_are_the_keys_alive_at_the_first_query_of_a_chunk():
    rng = np.random.default_rng(2)
    expiry_BKS = (np.arange(S) + rng.geometric(1 / 8, (B, K, S))).astype(np.int32)
    visible_BKTS = visibility(expiry_BKS, SEGMENT_BS)
    find = jax.jit(partial(survivors, capacity=12))
    for first in range(S):
        key_BKC, fits_BK = (np.asarray(x) for x in find(expiry_BKS, SEGMENT_BS, first))
        for b, head in np.ndindex(B, K):
            alive = np.nonzero(visible_BKTS[b, head, first, :first])[0].tolist()
            assert fits_BK[b, head] == (len(alive) <= 12)
            assert key_BKC[b, head].tolist() == (alive + [S] * 12)[:12]


@pytest.mark.core
def test_forward_and_backward_stay_linear_in_the_length():
    length, capacity, chunk = 2048, 64, 64
    shapes = [*[((1, length, 1, 16), "float32")] * 3, ((1, 1, length), "int32"), ((1, length), "int32")]

    def loss(*arguments):
        o_BTHD, lse_BHT, _ = compacted_attention(*arguments, chunk=chunk, capacity=capacity)
        return o_BTHD.sum() + lse_BHT.sum()

    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    assert largest_intermediate(jax.value_and_grad(loss, argnums=(0, 1, 2)), *arguments) <= length * 16
