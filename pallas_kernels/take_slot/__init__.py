"""What becomes of the slots of a cache as a token arrives: one gets its priority, one is taken."""

from pallas_kernels.take_slot.api import take_slot
from pallas_kernels.take_slot.slots import CLOSED, EMPTY, PROTECTED, weakest_slot

__all__ = ["CLOSED", "EMPTY", "PROTECTED", "take_slot", "weakest_slot"]
