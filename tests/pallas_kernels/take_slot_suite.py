"""The suite every back end of `take_slot` runs: subclass `TakeSlotSuite` and name the back end.

The judge is a loop over the tokens of every head.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.take_slot import CLOSED, EMPTY, PROTECTED, take_slot

K, WINDOW, PINNED = 2, 8, 3
ROWS = (
    "ties", "the_leaving_token_is_the_weakest", "empty_and_closed_slots", "nothing_but_protected_tokens",
    "of_another_row", "a_pinned_token_leaves", "a_head_has_lost_the_leaving_token", "nothing_leaves_yet",
    "a_token_as_low_as_an_empty_slot",
)  # fmt: skip
# Slots: a number that a thread has one or four of; and what makes tiles overlap, or need a second round.
CASES = {"one_tile": 128, "overlapping_tiles": 192, "four_a_thread": 576, "two_rounds": 5184}


def random_inputs(slots: int, seed: int = 0):
    """(positions, priorities, ring, priority of the leaving token, position, pinned, own), a row of every kind."""
    rng = np.random.default_rng(seed)
    B, C = len(ROWS), slots
    kind = {name: row for row, name in enumerate(ROWS)}
    position_B = np.full(B, C + 70)
    position_BKC = rng.permuted(np.broadcast_to(np.arange(70, C + 70), (B, K, C)), axis=-1)
    priority_BKC = rng.choice([-1.5, -0.0, 0.0, 2.0, PROTECTED], size=(B, K, C))
    leaving_priority_BK = rng.choice([-1.5, 0.0, 5.0], size=(B, K))

    leaving_priority_BK[kind["the_leaving_token_is_the_weakest"]] = -9
    vacant_KC = rng.permuted(np.broadcast_to(np.arange(C) < 5, (K, C)), axis=-1)
    closed_C = np.arange(C) >= C - 6
    for name in ("empty_and_closed_slots", "a_token_as_low_as_an_empty_slot"):
        position_BKC[kind[name]][vacant_KC] = EMPTY
    for name in ("empty_and_closed_slots", "nothing_but_protected_tokens"):
        position_BKC[kind[name]][:, closed_C] = CLOSED
    # What is written in a slot without a token means nothing.
    priority_BKC[kind["nothing_but_protected_tokens"]] = np.where(closed_C, -1.5, PROTECTED)
    leaving_priority_BK[kind["nothing_but_protected_tokens"]] = PROTECTED
    priority_BKC[kind["a_token_as_low_as_an_empty_slot"]][~vacant_KC] = rng.choice([-np.inf, 0.0], size=K * C - 5 * K)
    pinned_B = np.where(np.arange(B) == kind["a_pinned_token_leaves"], C + 70, PINNED)
    lost_KC = position_BKC[kind["a_head_has_lost_the_leaving_token"]] == C + 70 - WINDOW
    position_BKC[kind["a_head_has_lost_the_leaving_token"]][lost_KC] = 1
    # Token -1 would leave: the position of an empty slot.
    early = kind["nothing_leaves_yet"]
    position_B[early], pinned_B[early] = WINDOW - 1, 0
    position_BKC[early] = np.where(position_BKC[early] - 70 < WINDOW - 1, position_BKC[early] - 70, EMPTY)

    ring_BKW = rng.integers(0, C + 1, size=(B, K, WINDOW))
    dtypes = (np.int32, np.float32, np.int32, np.float32, np.int32, np.int32)
    numbers = position_BKC, priority_BKC, ring_BKW, leaving_priority_BK, position_B, pinned_B
    own_B = np.arange(B) != kind["of_another_row"]
    return *(x.astype(dtype) for x, dtype in zip(numbers, dtypes, strict=True)), own_B


def by_hand(position_BKC, priority_BKC, ring_BKW, leaving_priority_BK, position_B, pinned_B, own_B):
    """The four results, head by head."""
    position_BKC, priority_BKC, ring_BKW = (x.copy() for x in (position_BKC, priority_BKC, ring_BKW))
    slot_BK = np.full(leaving_priority_BK.shape, position_BKC.shape[-1])
    for row, head in np.ndindex(*slot_BK.shape):
        if not own_B[row]:
            continue
        position_C, priority_C = position_BKC[row, head], priority_BKC[row, head]
        leaving = position_B[row] - WINDOW
        for slot, position in enumerate(position_C):
            if position == leaving >= pinned_B[row]:
                priority_C[slot] = leaving_priority_BK[row, head]
        worth = {EMPTY: -np.inf, CLOSED: np.inf}
        keys = [(worth.get(p, priority), -p) for p, priority in zip(position_C.tolist(), priority_C, strict=True)]
        slot_BK[row, head] = slot = keys.index(min(keys))
        position_C[slot], priority_C[slot] = position_B[row], PROTECTED
        ring_BKW[row, head, position_B[row] % WINDOW] = slot
    return position_BKC, priority_BKC, ring_BKW, slot_BK


def assert_is_by_hand(backend: str, inputs) -> None:
    got = jax.jit(partial(take_slot, backend=backend))(*inputs)
    wanted = by_hand(*inputs)
    for row, name in enumerate(ROWS):
        for got_B, wanted_B in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(got_B[row], wanted_B[row], err_msg=name)
    assert [x.dtype for x in got] == [jnp.int32, jnp.float32, jnp.int32, jnp.int32]


class TakeSlotSuite:
    """What any back end must satisfy."""

    backend: str

    @pytest.mark.parametrize("name", CASES)
    def test_slots_and_what_is_written_are_those_of_a_loop_over_the_tokens(self, name):
        assert_is_by_hand(self.backend, random_inputs(CASES[name]))
