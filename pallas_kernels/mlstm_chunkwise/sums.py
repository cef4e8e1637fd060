"""Running sums for their differences, shared by the forms of `mlstm_chunkwise`."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_STEP = 2.0**-12


@partial(jax.tree_util.register_dataclass, data_fields=["coarse", "fine"], meta_fields=[])
@dataclass(frozen=True)
class RunningSum:
    """Sums of all entries up to each, along the last axis, in two parts.

    A weight is the exponential of a difference of two sums. Sums grow with all that came before, other documents too,
    and their rounding errors with them, however small the difference is. Multiples of 2^-12 are added and subtracted in
    float32 without any, up to 4,096; what is left is small. Gradients go through the fine part.
    """

    coarse: Float[Array, "... L"]
    fine: Float[Array, "... L"]

    @classmethod
    def of(cls, x: Float[Array, "... L"]) -> "RunningSum":
        coarse = lax.stop_gradient(jnp.round(x / _STEP) * _STEP)
        return cls(jnp.cumsum(coarse, axis=-1), jnp.cumsum(x - coarse, axis=-1))

    @property
    def end(self) -> Float[Array, "..."]:
        """The sum of all."""
        return self.coarse[..., -1] + self.fine[..., -1]

    def after(self, start: Float[Array, "..."]) -> Float[Array, "... L"]:
        """Each sum with what was before the first entry."""
        return (start[..., None] + self.coarse) + self.fine

    def to_end(self) -> Float[Array, "... L"]:
        """What comes after each entry."""
        return (self.coarse[..., -1:] - self.coarse) + (self.fine[..., -1:] - self.fine)

    def between(self) -> Float[Array, "... L L"]:
        """What comes after each entry (last axis), up to and with each other one."""
        coarse, fine = (x[..., None] - x[..., None, :] for x in (self.coarse, self.fine))
        return coarse + fine
