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
    leaving_token,
    live_entries,
    place,
    plan_cache,
    survived,
)
from pallas_kernels.rows import write_rows
from pallas_kernels.take_slot import take_slot

B, K, D, WINDOW = 3, 2, 4, 5
PLAN = plan_cache("p", 12, sinks=2, window=WINDOW, state_bytes=0, entry_bytes=1)
C, S = PLAN.slots, 20


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
    pinned_B, own_B = jnp.full(B, PLAN.sinks), jnp.full(B, True)
    numbers = cache.position_BKC, cache.priority_BKC, cache.ring_BKW
    *numbers, slot_BK = take_slot(*numbers, priority_BK, position_B, pinned_B, own_B)
    row_BKD = jnp.broadcast_to(position_B[:, None, None], (B, K, D)).astype(jnp.float32)
    k_BKCD, v_BKCD = (write_rows(old, slot_BK, new) for old, new in ((cache.k_BKCD, row_BKD), (cache.v_BKCD, -row_BKD)))
    return (leaving.position_B, leaving.k_BKD, leaving.v_BKD), LayerCache(k_BKCD, v_BKCD, *numbers, ())


@pytest.mark.core
@pytest.mark.parametrize("plan", [PLAN, PLAN.aligned(8)], ids=["all_open", "some_closed"])
def test_the_ring_finds_the_leaving_token_over_more_than_two_windows(plan):
    length_B = np.array([1, 4, 19])
    cache = compact(*prompt(length_B), length_B, plan)
    assert cache.position_BKC.shape[-1] == plan.allocated
    rng = np.random.default_rng(1)
    for step in range(3 * WINDOW + C):
        position_B = length_B + step
        (leaving_B, k_BKD, v_BKD), cache = arrive(cache, position_B, rng.integers(0, 3, size=(B, K)).astype(np.float32))
        np.testing.assert_array_equal(leaving_B, position_B - WINDOW)
        for row, leaving in enumerate(position_B - WINDOW):
            np.testing.assert_array_equal(k_BKD[row], max(leaving, 0))
            np.testing.assert_array_equal(v_BKD[row], -max(leaving, 0))
        # Nothing protected is ever lost, no slot holds what another holds, none beyond the plan exists.
        position_BKC, priority_BKC = jax.device_get((cache.position_BKC, cache.priority_BKC))
        for row, head in np.ndindex(B, K):
            held = [int(p) for p in position_BKC[row, head] if p >= 0]
            window = range(max(position_B[row] - WINDOW + 1, 0), position_B[row] + 1)
            assert len(held) == len(set(held)) == min(position_B[row] + 1, C)
            assert set(held) >= set(window) | set(range(min(PLAN.sinks, position_B[row] + 1)))
            protected = priority_BKC[row, head] == PROTECTED
            assert {int(p) for p in position_BKC[row, head, protected] if p >= PLAN.sinks} <= set(window)


def test_a_token_is_placed_in_the_rows_whose_own_it_is_only():
    cache = compact(*prompt(np.array([1, 4, 19])), np.array([1, 4, 19]), PLAN)
    slot_BK, position_B, own_B = (
        np.array([[5, 3], [1, 6], [2, 4]]),
        np.array([50, 60, 70]),
        np.array([True, False, True]),
    )
    got, where_BK = place(cache, slot_BK, position_B, jnp.array([7.0, 8.0, 9.0]), own_B)
    np.testing.assert_array_equal(where_BK, [[5, 3], [C, C], [2, 4]])
    for field, new_B in (("position_BKC", position_B), ("priority_BKC", [7, 8, 9])):
        wanted_BKC = np.array(getattr(cache, field))
        for row, head in np.ndindex(B, K):
            if own_B[row]:
                wanted_BKC[row, head, slot_BK[row, head]] = new_B[row]
        np.testing.assert_array_equal(getattr(got, field), wanted_BKC)


def test_float64_priorities_do_not_change_the_dtype_of_the_cache(float64):
    cache = compact(*prompt(np.array([1, 4, 19])), np.array([1, 4, 19]), PLAN)
    wide_B = jnp.full(B, 0.1, jnp.float64)
    assert (
        place(cache, np.zeros((B, K), int), np.arange(B), wide_B, np.ones(B, bool))[0].priority_BKC.dtype == "float32"
    )
