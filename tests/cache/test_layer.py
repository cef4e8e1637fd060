"""The slots of one layer, against what a dictionary from slot to token would say."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpop_jax.cache import (
    PROTECTED,
    CachePlan,
    LayerCache,
    cache_from_prompt,
    choose_victim,
    leaving_token,
    live_entries,
    place,
    plan_cache,
    replace_priority,
    survived,
)

B, K, D, WINDOW = 3, 2, 4, 5
PLAN = plan_cache("p", 12, sinks=2, window=WINDOW, state_bytes=0, entry_bytes=1)
C, S = PLAN.slots, 20


def make_cache(position_BKC, priority_BKC) -> LayerCache:
    position_BKC = np.asarray(position_BKC, np.int32)
    rows_BKCD = np.zeros((*position_BKC.shape, D), np.float32)
    ring_BKW = np.zeros((*position_BKC.shape[:2], WINDOW), np.int32)
    return LayerCache(rows_BKCD, rows_BKCD, position_BKC, np.asarray(priority_BKC, np.float32), ring_BKW, ())


def victim_by_hand(position_C, priority_C) -> int:
    """An empty slot, else the lowest priority, the youngest of those."""
    empty = [slot for slot, position in enumerate(position_C) if position < 0]
    return min(empty or range(len(position_C)), key=lambda slot: (priority_C[slot], -position_C[slot]))


@pytest.mark.core
def test_the_victim_is_an_empty_slot_else_the_youngest_of_the_lowest_priorities():
    rng = np.random.default_rng(0)
    shape_BKC = (64, K, 7)
    position_BKC = rng.permuted(np.broadcast_to(np.arange(7), shape_BKC), axis=-1)
    priority_BKC = rng.choice([-1.5, 0.0, 2.0, np.inf], size=shape_BKC)
    position_BKC[:16, :, 2] = -1
    priority_BKC[:8, :, 2] = np.inf  # what an emptied slot was worth means nothing
    priority_BKC[16:24] = 1.0  # nothing but ties
    priority_BKC[24:32] = np.inf  # nothing but protected tokens
    victim_BK = np.asarray(jax.jit(choose_victim)(make_cache(position_BKC, priority_BKC)))
    for row, head in np.ndindex(*victim_BK.shape):
        assert victim_BK[row, head] == victim_by_hand(position_BKC[row, head], priority_BKC[row, head])
    unprotected_BK = (priority_BKC < PROTECTED).any(-1) & (position_BKC >= 0).all(-1)
    chosen_BK = np.take_along_axis(priority_BKC, victim_BK[..., None], axis=-1)[..., 0]
    assert np.all(chosen_BK[unprotected_BK] < PROTECTED)


@partial(jax.jit, static_argnums=3)
def compact(alive_BKS, priority_BKS, length_B, plan: CachePlan):
    row_BSKD = jnp.broadcast_to(jnp.arange(S, dtype=jnp.float32)[None, :, None, None], (B, S, K, D))
    return cache_from_prompt(row_BSKD, -row_BSKD, alive_BKS, priority_BKS, length_B, plan, ())


def prompt(length_B, seed: int = 0):
    """Survivors of prompts of these lengths under random priorities, as (alive, priority)."""
    rng = np.random.default_rng(seed)
    priority_BKS = rng.normal(size=(B, K, S)).astype(np.float32)
    index_S = np.arange(S)
    protected_BS = (index_S < PLAN.sinks) | (index_S >= length_B[:, None] - WINDOW)
    priority_BKS = np.where(protected_BS[:, None], np.inf, priority_BKS)
    ranked_BKS = np.where((index_S < length_B[:, None])[:, None], priority_BKS, -np.inf)
    alive_BKS = np.argsort(np.argsort(-ranked_BKS, axis=-1, kind="stable"), axis=-1) < C
    return alive_BKS & (index_S < length_B[:, None])[:, None], priority_BKS


@pytest.mark.core
def test_the_cache_of_a_prompt_holds_its_survivors_and_knows_its_window():
    length_B = np.array([1, 4, 19])
    alive_BKS, priority_BKS = prompt(length_B)
    cache = jax.device_get(compact(alive_BKS, priority_BKS, length_B, PLAN))
    assert cache.position_BKC.shape == (B, K, C)
    for row, head in np.ndindex(B, K):
        position_C = np.asarray(cache.position_BKC[row, head])
        occupied = position_C >= 0
        tokens = np.flatnonzero(alive_BKS[row, head])
        assert sorted(position_C[occupied]) == tokens.tolist()
        np.testing.assert_array_equal(cache.k_BKCD[row, head, occupied, 0], position_C[occupied])
        np.testing.assert_array_equal(cache.v_BKCD[row, head, occupied, 0], -position_C[occupied])
        np.testing.assert_array_equal(
            cache.priority_BKC[row, head, occupied], priority_BKS[row, head, position_C[occupied]]
        )
        for position in range(max(length_B[row] - WINDOW, 0), length_B[row]):
            assert position_C[cache.ring_BKW[row, head, position % WINDOW]] == position
    np.testing.assert_array_equal(np.max(live_entries(cache), axis=-1), np.minimum(length_B, C))
    np.testing.assert_allclose(survived(cache, length_B), np.minimum(length_B, C) / length_B, rtol=1e-6)


@jax.jit
def arrive(cache, position_B, priority_BK):
    leaving = leaving_token(cache, position_B)
    cache = replace_priority(cache, leaving.slot_BK, priority_BK, leaving.position_B >= PLAN.sinks)
    slot_BK = choose_victim(cache)
    return leaving, place(cache, slot_BK, position_B)


@pytest.mark.core
@pytest.mark.parametrize("plan", [PLAN, PLAN.aligned(8)], ids=["all_open", "some_closed"])
def test_the_ring_finds_the_leaving_token_over_more_than_two_windows(plan):
    length_B = np.array([1, 4, 19])
    cache = compact(*prompt(length_B), length_B, plan)
    assert cache.position_BKC.shape[-1] == plan.allocated
    rng = np.random.default_rng(1)
    for step in range(3 * WINDOW + C):
        position_B = length_B + step
        before_BKC = np.asarray(cache.position_BKC)
        leaving, cache = arrive(cache, position_B, rng.integers(0, 3, size=(B, K)).astype(np.float32))
        np.testing.assert_array_equal(leaving.position_B, position_B - WINDOW)
        left_BK = np.take_along_axis(before_BKC, np.asarray(leaving.slot_BK)[..., None], axis=-1)[..., 0]
        for row in np.flatnonzero(position_B >= WINDOW):
            np.testing.assert_array_equal(left_BK[row], position_B[row] - WINDOW)
        # Nothing protected is ever lost, no slot holds what another holds, none beyond the plan exists.
        position_BKC, priority_BKC = jax.device_get((cache.position_BKC, cache.priority_BKC))
        for row, head in np.ndindex(B, K):
            held = [int(p) for p in position_BKC[row, head] if p >= 0]
            window = range(max(position_B[row] - WINDOW + 1, 0), position_B[row] + 1)
            assert len(held) == len(set(held)) == min(position_B[row] + 1, C)
            assert set(held) >= set(window) | set(range(min(PLAN.sinks, position_B[row] + 1)))
            protected = priority_BKC[row, head] == PROTECTED
            assert {int(p) for p in position_BKC[row, head, protected] if p >= PLAN.sinks} <= set(window)


def test_a_priority_is_replaced_in_its_slot_and_in_the_marked_rows_only():
    cache = make_cache(np.broadcast_to(np.arange(C), (B, K, C)), np.zeros((B, K, C)))
    slot_BK = np.array([[0, 3], [1, 1], [2, 4]])
    got_BKC = replace_priority(cache, slot_BK, jnp.full((B, K), 7.0), np.array([True, False, True])).priority_BKC
    wanted_BKC = np.zeros((B, K, C))
    wanted_BKC[0, [0, 1], [0, 3]] = wanted_BKC[2, [0, 1], [2, 4]] = 7
    np.testing.assert_array_equal(got_BKC, wanted_BKC)


def test_float64_priorities_do_not_change_the_dtype_of_the_cache(float64):
    cache = make_cache(np.broadcast_to(np.arange(C), (B, K, C)), np.zeros((B, K, C)))
    changed = replace_priority(cache, np.zeros((B, K), int), jnp.full((B, K), 0.1, jnp.float64), np.ones(B, bool))
    assert changed.priority_BKC.dtype == jnp.float32
