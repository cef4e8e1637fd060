from dataclasses import replace

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
from hypothesis import strategies as st
from oracles import largest_intermediate, segment_rows, visibility

from kvpop_jax.eviction import TokenLayout, eligible_range, expiry_from_priority, ranks, running_cutoff
from kvpop_jax.eviction.expiry import eviction_mask, kth_rank
from pallas_kernels.masked_attention import NEVER

compute_expiry = jax.jit(expiry_from_priority)


@jax.jit
def compute_cutoff(rank_BKS, start_BS, stop_BS, pool_BS):
    """(`kth_rank`, `running_cutoff`): together, because they compile to one program."""
    arguments = rank_BKS, start_BS, stop_BS, pool_BS
    return kth_rank(*arguments), running_cutoff(*arguments)


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


@settings(max_examples=30)
@given(problem=problems(), seed=st.integers(0, 2**32 - 1))
def test_the_cutoff_of_a_document_only_improves(problem, seed):
    layout = layout_of(**problem.layout_arguments)
    _, cutoff_BKS = compute_cutoff(random_ranks(seed), *eligible_range(layout, problem.window), layout.pool_BS)
    for document in documents_of(problem):
        assert np.all(np.diff(np.asarray(cutoff_BKS)[document.row][:, document.tokens], axis=-1) <= 0)


@pytest.mark.core
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_cutoff_and_kth_rank_are_those_of_the_sorted_range(seed):
    rng = np.random.default_rng(seed)
    rank_BKS = random_ranks(seed)
    start_BS = rng.integers(0, LENGTH + 1, (2, LENGTH)).astype(np.int32)
    stop_BS = rng.integers(start_BS, LENGTH + 1).astype(np.int32)
    k_BS = rng.integers(0, stop_BS - start_BS + 3).astype(np.int32)
    kth_BKS, cutoff_BKS = (np.asarray(x) for x in compute_cutoff(rank_BKS, start_BS, stop_BS, k_BS))
    for b, head, q in np.ndindex(cutoff_BKS.shape):
        members, k = np.sort(rank_BKS[b, head, start_BS[b, q] : stop_BS[b, q]]), k_BS[b, q]
        if 0 < k <= len(members):
            assert kth_BKS[b, head, q] == members[k - 1]
        worst_kept = LENGTH if len(members) <= k else members[k - 1] if k else -1
        assert cutoff_BKS[b, head, q] == worst_kept


def random_ranks(seed: int) -> np.ndarray:
    every = np.tile(np.arange(LENGTH, dtype=np.int32), (2, HEADS, 1))
    return np.random.default_rng(seed).permuted(every, axis=-1)


@pytest.mark.core
def test_of_equal_priorities_the_older_ranks_first_and_minus_zero_is_zero():
    priority_BKS = np.array([[[0.0, -0.0, 1.0, 0.0, -1.0, 1.0]]], np.float32)
    assert np.asarray(ranks(priority_BKS)).tolist() == [[[2, 3, 0, 4, 5, 1]]]


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


def test_the_dense_picture_of_an_expiry_is_what_attention_sees():
    rng = np.random.default_rng(0)
    segment_BS = segment_rows([[9, -4, 11], [24]], LENGTH)
    expiry_BKS = rng.integers(0, LENGTH + 2, (2, HEADS, LENGTH))
    np.testing.assert_array_equal(eviction_mask(expiry_BKS, segment_BS), visibility(expiry_BKS, segment_BS))


@pytest.mark.core
def test_no_map_of_queries_by_keys_is_made():
    S = 2048
    by_token = jax.ShapeDtypeStruct((1, S), jnp.int32)
    layout = TokenLayout(by_token, by_token, jax.ShapeDtypeStruct((1, S), jnp.bool_), by_token)
    priority_BKS = jax.ShapeDtypeStruct((1, 1, S), jnp.float32)
    assert largest_intermediate(lambda *x: expiry_from_priority(*x, 256), priority_BKS, layout) <= 4 * S
