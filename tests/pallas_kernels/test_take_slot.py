"""The reference of `take_slot`: the common suite, many draws, and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from take_slot_suite import TakeSlotSuite, assert_is_by_hand, random_inputs

from pallas_kernels.backend import BackendError
from pallas_kernels.take_slot import take_slot


class TestReference(TakeSlotSuite):
    backend = "reference"

    def test_no_draw_of_ties_and_empty_slots_differs_from_the_loop(self):
        for seed in range(1, 40):
            assert_is_by_hand(self.backend, random_inputs(16, seed))


def test_wider_arguments_do_not_change_the_dtypes_of_the_cache(float64):
    position_BKC, priority_BKC, ring_BKW, *rest = random_inputs(16)
    wide = (x.astype(np.result_type(x, np.int64)) if x.dtype != bool else x for x in rest)
    position_BKC, priority_BKC, ring_BKW, slot_BK = jax.jit(take_slot)(position_BKC, priority_BKC, ring_BKW, *wide)
    dtypes = [x.dtype for x in (position_BKC, priority_BKC, ring_BKW, slot_BK)]
    assert dtypes == [jnp.int32, jnp.float32, jnp.int32, jnp.int32]


def test_an_unknown_backend_is_refused():
    with pytest.raises(BackendError, match="nonesuch"):
        take_slot(*random_inputs(16), backend="nonesuch")
