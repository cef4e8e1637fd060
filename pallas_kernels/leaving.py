"""The token that leaves the window as a new one arrives: where a cache has it, and its rows read from there."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.rows import Rows, read_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Leaving:
    """The token that leaves a window of W tokens as a new one arrives, in a cache that does not hold the new one yet.

    Nothing is read before it is asked for: a policy that ranks by position asks for no rows, and a kernel reads them
    where it needs them.

    Attributes:
        arriving_B: position of the new token.
        k_BKCD, v_BKCD: [B, K, C, D], plain or quantised.
        position_BKC: of the token in each slot.
        ring_BKW: slot of position p at p mod W. A slot of C or more is none.
    """

    arriving_B: Int[Array, "B"]
    k_BKCD: Rows
    v_BKCD: Rows
    position_BKC: Int[Array, "B K C"]
    ring_BKW: Int[Array, "B K W"]

    @property
    def position_B(self) -> Int[Array, "B"]:
        """W positions before the new token, so negative while no token leaves."""
        return self.arriving_B - self.ring_BKW.shape[-1]

    @property
    def k_BKD(self) -> Float[Array, "B K D"]:
        """The token's keys; zeros where a head no longer holds it (another policy cut the prompt), or none leaves."""
        return self._read(self.k_BKCD)

    @property
    def v_BKD(self) -> Float[Array, "B K D"]:
        """The token's values, as `k_BKD`."""
        return self._read(self.v_BKCD)

    def _read(self, rows: Rows) -> Float[Array, "B K D"]:
        window, slots = self.ring_BKW.shape[-1], self.position_BKC.shape[-1]
        position_B1 = self.position_B[:, None]
        slot_BK1 = jnp.take_along_axis(self.ring_BKW, (self.arriving_B % window)[:, None, None], axis=-1)
        slot_BK1 = jnp.minimum(slot_BK1, slots - 1)

        def row(x):
            return jnp.take_along_axis(x, slot_BK1.reshape(*slot_BK1.shape, *(1,) * (x.ndim - 3)), axis=2)[:, :, 0]

        held_BK = (row(self.position_BKC) == position_B1) & (position_B1 >= 0)
        return jnp.where(held_BK[..., None], read_rows(jax.tree.map(row, rows)), 0)


def leaving_at_once(position_B: Int[Array, "B"], k_BKD: Float[Array, "B K D"], v_BKD: Float[Array, "B K D"]) -> Leaving:
    """A token on its own, in a cache of one slot and a window of one token."""
    position_BK1 = jnp.broadcast_to(position_B[:, None, None], (*k_BKD.shape[:2], 1))
    return Leaving(position_B + 1, k_BKD[:, :, None], v_BKD[:, :, None], position_BK1, jnp.zeros_like(position_BK1))
