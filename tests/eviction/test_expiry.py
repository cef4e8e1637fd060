from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eviction_oracles import (
    HEADS,
    LENGTH,
    Problem,
    deleting_cache,
    documents_of,
    layout_of,
    priorities,
    problems,
    top_k_mask,
)
from hypothesis import given, settings
from oracles import segment_rows, visibility

from kvpop_jax.eviction import TokenLayout, expiry, expiry_from_priority
from pallas_kernels.masked_attention import NEVER

compute_expiry = jax.jit(expiry_from_priority)


def expiry_mask(priority_BKS: np.ndarray, problem: Problem) -> np.ndarray:
    expiry_BKS = compute_expiry(priority_BKS, layout_of(**problem.layout_arguments), problem.window)
    return visibility(np.asarray(expiry_BKS), problem.segment_BS)


@pytest.mark.core
@settings(max_examples=60)
@given(problem=problems(), priority_BKS=priorities())
def test_expiry_is_a_cache_that_deletes_is_a_top_k_mask(problem, priority_BKS):
    mask_BKTS = expiry_mask(priority_BKS, problem)
    np.testing.assert_array_equal(mask_BKTS, deleting_cache(priority_BKS, problem))
    np.testing.assert_array_equal(mask_BKTS, top_k_mask(priority_BKS, problem))
    for document in documents_of(problem):
        seen_KT = mask_BKTS[document.row][:, document.tokens].sum(-1)
        assert np.all(seen_KT <= len(document.pinned) + problem.window + document.pool)


@pytest.mark.core
@pytest.mark.parametrize("length", [1, 33])
def test_expiry_is_a_cache_that_deletes_at_any_length(length):
    rng = np.random.default_rng(length)
    for pool in range(0, length + 1, max(length // 3, 1)):
        segment_BS = segment_rows([[length], [length // 2, -(length // 4)]], length)
        prompt_BS = np.zeros(segment_BS.shape, bool)
        problem = Problem(segment_BS, prompt_BS, sinks=1, window=2, pool_B=np.array([pool, pool + 1], np.int32))
        priority_BKS = rng.integers(0, max(length, 2), (2, HEADS, length)).astype(np.float32)
        np.testing.assert_array_equal(expiry_mask(priority_BKS, problem), deleting_cache(priority_BKS, problem))


@pytest.mark.core
@pytest.mark.parametrize("length", [1, 32, 33, 1090, 1120])
@pytest.mark.parametrize("longest_column", [1, 1000])
def test_the_kth_before_is_that_of_the_sorted_entries(length, longest_column, monkeypatch):
    monkeypatch.setattr(expiry, "_MOST_BLOCKS", (8, 8))  # the longest in blocks of several words
    monkeypatch.setattr(expiry, "_LONGEST_COLUMN", longest_column)
    rng = np.random.default_rng(length)
    x_BKS = rng.permuted(np.tile(np.arange(length, dtype=np.int32), (2, HEADS, 1)), axis=-1)
    x_BKS[1, 0] = np.arange(length)[::-1]
    least_BKS = rng.integers(0, rng.integers(1, length, x_BKS.shape, endpoint=True)).astype(np.int32)
    least_BKS[..., -1] = length
    k_BKS = rng.integers(1, rng.integers(2, np.arange(length) + 3, x_BKS.shape)).astype(np.int32)
    kth = jax.jit(lambda *arrays: expiry.kth_of_those_before(*arrays))  # of its own: a trace is kept for the function
    got_BKS = np.asarray(kth(x_BKS, np.argsort(x_BKS, axis=-1), least_BKS, k_BKS))
    found = 0
    for at in np.ndindex(x_BKS.shape):
        before = x_BKS[at[0], at[1], : at[2]]
        enough = np.sort(before[before >= least_BKS[at]])[k_BKS[at] - 1 :]
        found += len(enough) > 0
        assert got_BKS[at] == enough[0] if len(enough) else got_BKS[at] >= length
    assert found > 0.2 * x_BKS.size or length == 1


@pytest.mark.core
def test_of_equal_priorities_the_older_ranks_first_and_minus_zero_is_zero():
    priority_BKS = np.array([[[0.0, -0.0, 1.0, 0.0, -1.0, 1.0, -np.inf, np.inf, -2e-30, 2.5]]], np.float32)
    rank_BKS, token_BKS = (np.asarray(x) for x in expiry.ranks(priority_BKS))
    assert token_BKS.tolist() == [[[7, 9, 2, 5, 0, 1, 3, 8, 4, 6]]]
    assert rank_BKS.tolist() == np.argsort(token_BKS, axis=-1).tolist()


@pytest.mark.core
@settings(max_examples=20)
@given(problem=problems(prompts=False), priority_BKS=priorities())
def test_a_pool_as_long_as_the_row_is_dense_attention(problem, priority_BKS):
    layout = layout_of(**replace(problem, pool_B=np.full(2, LENGTH, np.int32)).layout_arguments)
    expiry_BKS = compute_expiry(priority_BKS, layout, problem.window)
    assert np.all(np.asarray(expiry_BKS) == NEVER)


@pytest.mark.core
@settings(max_examples=20)
@given(problem=problems(prompts=False))
def test_recency_is_a_longer_window_and_equal_priorities_keep_the_oldest(problem):
    recency_BKS = np.broadcast_to(np.arange(LENGTH, dtype=np.float32), (2, HEADS, LENGTH))
    recent_BKTS = expiry_mask(recency_BKS, problem)
    oldest_BKTS = expiry_mask(np.zeros_like(recency_BKS), problem)
    for document in documents_of(problem):
        for q in document.tokens:
            past = np.arange(document.tokens.start, q + 1)
            age, back, sinks, window, pool = past - past[0], q - past, problem.sinks, problem.window, document.pool
            longer = past[(age < sinks) | (back < window + pool)].tolist()
            older = past[(age < sinks + pool) | (back < window)].tolist()
            for head in range(HEADS):
                assert np.nonzero(recent_BKTS[document.row, head, q])[0].tolist() == longer
                assert np.nonzero(oldest_BKTS[document.row, head, q])[0].tolist() == older


@pytest.mark.core
def test_a_document_is_evicted_as_if_it_were_alone():
    rng = np.random.default_rng(3)
    priority_BKS = rng.normal(size=(2, HEADS, LENGTH)).astype(np.float32)
    prompt_BS, pool_B = np.zeros((2, LENGTH), bool), np.array([3, 4], np.int32)
    packed = Problem(segment_rows([[9, 15], [9, 15]], LENGTH), prompt_BS, sinks=1, window=2, pool_B=pool_B)
    alone = replace(packed, segment_BS=segment_rows([[-9, 15], [9]], LENGTH))
    packed_BKTS, alone_BKTS = expiry_mask(priority_BKS, packed), expiry_mask(priority_BKS, alone)
    np.testing.assert_array_equal(packed_BKTS[0][:, 9:], alone_BKTS[0][:, 9:])
    np.testing.assert_array_equal(packed_BKTS[1][:, :9], alone_BKTS[1][:, :9])


@pytest.mark.core
def test_no_map_of_queries_by_keys_is_made():
    S = 8192
    by_token = jax.ShapeDtypeStruct((1, S), jnp.int32)
    layout = TokenLayout(by_token, by_token, jax.ShapeDtypeStruct((1, S), jnp.bool_), by_token)
    priority_BKS = jax.ShapeDtypeStruct((1, 1, S), jnp.float32)
    compiled = jax.jit(partial(expiry_from_priority, window=256)).lower(priority_BKS, layout).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= S * S // 8


def test_long_rows_have_more_blocks_before_they_have_longer_ones():
    """A block has a pair of every two tokens, all of them compared at each step."""
    assert [expiry._block_length(S) for S in (1, 16_384, 32_768, 65_536, 131_072)] == [32, 32, 64, 64, 64]
    assert expiry._block_length(1 << 20) == 512
