"""The TPU kernels of `masked_attention`: the inherited suite over plain rows, and what is theirs alone."""

import heapq
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masked_attention_suite import MaskedAttentionSuite
from oracles import assert_close

from pallas_kernels.masked_attention import NEVER, masked_attention, tpu, tpu_blocks, tpu_compacted
from pallas_kernels.masked_attention.tpu_blocks import Blocks, blocks_for, chosen_chunk

pytestmark = pytest.mark.tpu


@pytest.fixture
def float64():
    """The kernels compute in float32; only the judge is in float64."""


@pytest.mark.usefixtures("plain_interpreter")
class TestPlainForm(MaskedAttentionSuite):
    backend = "tpu"
    dtype = "float32"
    tolerance = 2e-6


@pytest.mark.parametrize("chunk", [None, 256])
def test_results_are_those_of_the_reference_where_blocks_are_skipped(chunk, plain_interpreter, monkeypatch):
    monkeypatch.setattr(tpu, "chosen_chunk", lambda *_: chunk)
    x = _windowed(S=768, window=150, sinks=4)

    def loss(backend, q_BTHD, k_BSKD, v_BSKD):
        o_BTHD, lse_BHT = masked_attention(
            q_BTHD, k_BSKD, v_BSKD, x.expiry_BKS, x.segment_BS, capacity=154, backend=backend
        )
        return jnp.sum(o_BTHD * x.do_BTHD) + lse_BHT.sum(), o_BTHD

    run = [jax.jit(jax.value_and_grad(partial(loss, name), (0, 1, 2), has_aux=True)) for name in ("tpu", "reference")]
    results = [form(*x.qkv) for form in run]
    ((_, o_BTHD), gradients), ((_, wanted_BTHD), wanted) = jax.tree.map(np.asarray, results)
    for a, b in zip((o_BTHD, *gradients), (wanted_BTHD, *wanted), strict=True):
        assert_close(a, b, 2e-6)


def test_a_broken_promise_gives_nan_from_where_it_broke(plain_interpreter, monkeypatch):
    monkeypatch.setattr(tpu, "chosen_chunk", lambda *_: 128)
    x = _windowed(S=384, window=384, sinks=0)
    # Documents of 300 and of 84: 128 keys are alive where the second chunk starts, 256 where the third does.
    o_BTHD, lse_BHT = masked_attention(*x.qkv, x.expiry_BKS, x.segment_BS, capacity=128, backend="tpu")
    assert np.all(np.isfinite(o_BTHD[:, :256])) and np.all(np.isfinite(lse_BHT[..., :256]))
    assert np.all(np.isnan(o_BTHD[:, 256:])) and np.all(np.isnan(lse_BHT[..., 256:]))


@pytest.mark.parametrize("max_bounds", [32768, 6])
@pytest.mark.parametrize("old", [0, 256])
def test_no_visible_key_lies_in_a_block_that_is_skipped(old, max_bounds, monkeypatch):
    monkeypatch.setattr(tpu_blocks, "_MAX_BOUNDS", max_bounds)
    blocks = Blocks(rows=512, slots=512 + old, q=128, k=64, heads=2)
    assert blocks.num_bounds * blocks.heads <= max_bounds
    rng = np.random.default_rng(0)
    life_BKS = np.minimum(np.arange(blocks.slots) - old + rng.geometric(0.03, (1, 2, blocks.slots)), 512)
    life_BKS[..., 300:340] = NEVER
    row_T1 = np.arange(512)[:, None]
    skipped = 0
    bounds_N = np.asarray(blocks.bounds(jnp.asarray(life_BKS)))
    for head in range(2):
        seen_TS = (np.arange(blocks.slots) - old <= row_T1) & (row_T1 < life_BKS[0, head])
        for i in range(blocks.num_q):
            for j in range(blocks.num_k):
                seen = seen_TS[i * 128 : (i + 1) * 128, j * 64 : (j + 1) * 64].any()
                visible = bool(blocks.visible(i, j, blocks.bound(bounds_N, head, j)))
                assert visible or not seen
                skipped += not visible
    assert skipped > 2 * blocks.num_q, "lives and causality must hide blocks in this case"


def test_bounds_stay_small_in_scalar_memory_at_a_million_tokens():
    for heads in (1, 8, 64):
        assert blocks_for(2**20, 0, 4, heads).num_bounds * heads * 4 <= 2**17


def test_the_form_is_the_cheaper_one():
    choose = partial(chosen_chunk, group=4, heads=8, head_dim=128, itemsize=2)
    assert choose(131072, None) is None, "nothing is known of an uncapped rule"
    assert choose(2048, 4096) is None, "there is nothing to gather in a row shorter than the budget"
    assert choose(131072, 4096) == 1024
    assert choose(16384, 2048) is not None


def test_work_at_131072_tokens_and_4096_entries_is_a_twelfth_of_dense():
    """The cost that is stated, and the steps of the grid that compute something for the pools of a random priority."""
    S, budget, H, K, D = 131072, 4096, 32, 8, 128
    chunk = chosen_chunk(S, budget, H // K, K, D, 2)
    blocks = blocks_for(chunk, budget, H // K, K)
    stated = S // chunk * blocks.cost(H // K, D, 2, matmuls=2, arrays=2).flops
    dense = 4 * H * D * S * S / 2
    assert stated <= 0.08 * dense

    one = blocks_for(chunk, budget, 1, 1)
    assert (one.rows, one.slots) == (blocks.rows, blocks.slots)
    one = Blocks(blocks.rows, blocks.slots, blocks.q, blocks.k, heads=1)
    i_n1, j_n = jnp.arange(one.num_q)[:, None], jnp.arange(one.num_k)

    def step(survivors, first):
        own_end_BKL = jax.lax.dynamic_slice_in_dim(end_BKS, first, chunk, 2)
        life_BKC = jnp.concatenate([survivors.end_BKC, own_end_BKL], axis=-1) - first
        run = one.visible(i_n1, j_n, one.bounds(life_BKC)[j_n // one.grain]).sum()
        return tpu_compacted._next(survivors, own_end_BKL, first, S), run

    end_BKS = jnp.asarray(_pool_expiry(S, sinks=4, window=256, pool=budget - 260))[None, None]
    survivors, run_n = jax.lax.scan(step, tpu_compacted._nobody(one, end_BKS), jnp.arange(0, S, chunk))
    assert survivors.fits_BK.all()
    steps = int(run_n.sum())
    flops = 4 * D * blocks.q * blocks.k * H * steps
    print(f"\nstated {stated / dense:.4f} of dense causal FLOPs, run {flops / dense:.4f} in {steps} steps per KV head")
    assert 0.9 * stated <= flops <= stated


@dataclass(frozen=True)
class _Problem:
    """Two documents of a float32 row under a window."""

    qkv: tuple[np.ndarray, ...]
    do_BTHD: np.ndarray
    expiry_BKS: np.ndarray
    segment_BS: np.ndarray


def _windowed(S: int, window: int, sinks: int) -> _Problem:
    rng = np.random.default_rng(0)
    q_BTHD, k_BSKD, v_BSKD, do_BTHD = (rng.normal(size=(1, S, heads, 64)).astype(np.float32) for heads in (2, 1, 1, 2))
    t_S = np.arange(S)
    expiry_BKS = np.where(t_S < sinks, NEVER, t_S + window).astype(np.int32)[None, None]
    return _Problem((q_BTHD, k_BSKD, v_BSKD), do_BTHD, expiry_BKS, np.where(t_S < 300, 1, 2).astype(np.int32)[None])


def _pool_expiry(S: int, sinks: int, window: int, pool: int) -> np.ndarray:
    """Expiry under random static priorities: a heap holds the pool, and the weakest leaves."""
    priority_S = np.random.default_rng(0).random(S)
    expiry_S = np.full(S, NEVER, np.int64)
    heap: list[tuple[float, int]] = []
    for q in range(sinks + window, S):
        t = q - window
        heapq.heappush(heap, (priority_S[t], -t))
        if len(heap) > pool:
            expiry_S[-heapq.heappop(heap)[1]] = q
    return expiry_S.astype(np.int32)
