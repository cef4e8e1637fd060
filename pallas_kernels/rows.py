"""Rows of a cache: keys or values as they are, or in 8 bits with one scale for each row.

A row is one token's vector in one KV head. Its scale is its largest magnitude over the largest number of the format, so
that nothing overflows and a row depends on no other. Errors: in int8 at most half a step, 1/254 of the row's largest
entry; in fp8 (float8_e4m3fn) at most 1/16 of each entry, or 2^-10 of the scale where that is more.
"""

from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

ROW_DTYPES = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}
"""The formats of quantised rows, by the names that users give."""

_LARGEST = {ROW_DTYPES["int8"]: 127.0, ROW_DTYPES["fp8"]: 448.0}


@partial(jax.tree_util.register_dataclass, data_fields=["values_BKCD", "scale_BKC"], meta_fields=[])
@dataclass(frozen=True)
class QuantisedRows:
    """Rows in 8 bits: `values_BKCD` times `scale_BKC`, which is float32. Leading axes may be others."""

    values_BKCD: Shaped[Array, "... D"]
    scale_BKC: Float[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows that it stands for."""
        return self.values_BKCD.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of the values: one of `ROW_DTYPES`."""
        return self.values_BKCD.dtype


Rows: TypeAlias = Array | QuantisedRows
"""Keys or values of a cache, [B, K, C, D]."""


def to_rows(x: Float[Array, "... D"], dtype: DTypeLike | None) -> Rows:
    """The rows in that format, one of `ROW_DTYPES`; None leaves them as they are."""
    if dtype is None:
        return x
    dtype = jnp.dtype(dtype)
    largest = _LARGEST[dtype]
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) * (1 / largest)
    unit = wide / jnp.where(scale > 0, scale, 1)[..., None]
    return QuantisedRows((jnp.round(unit) if dtype == ROW_DTYPES["int8"] else unit).astype(dtype), scale)


def read_rows(rows: Rows) -> Float[Array, "... D"]:
    """What the rows stand for; quantised ones in float32."""
    if isinstance(rows, QuantisedRows):
        return rows.values_BKCD.astype(jnp.float32) * rows.scale_BKC[..., None]
    return rows


def as_factors(rows: Rows, dtype: DTypeLike) -> tuple[Float[Array, "B K C D"], Float[Array, "B K 1 C"] | float]:
    """The rows as a factor of a product, and what a number per slot must be multiplied by to make up for it.

    The values are exact in bfloat16 or wider, so only what is of the size of a score meets the scale.
    """
    if isinstance(rows, QuantisedRows):
        return rows.values_BKCD.astype(dtype), rows.scale_BKC[:, :, None]
    return rows, 1.0


def slots_of(rows: Rows, start: int | Int[Array, ""], count: int) -> Rows:
    """`count` slots of every head, from `start` on."""
    cut = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=count, axis=2)
    return jax.tree.map(lambda leaf: cut(_bits(leaf)).view(leaf.dtype), rows)


def write_rows(rows: Rows, slot_BK: Int[Array, "B K"], new_BKD: Float[Array, "B K D"]) -> Rows:
    """The rows with a new one in each head's slot, in their format. A slot of C or more writes nothing."""
    B, K = slot_BK.shape
    new = to_rows(new_BKD, rows.dtype if isinstance(rows, QuantisedRows) else None)
    # `.at[].set` drops an index out of range; `dynamic_update_slice` would clamp it onto the last slot.
    at = jnp.arange(B)[:, None], jnp.arange(K), slot_BK
    return jax.tree.map(lambda old, row: _bits(old).at[at].set(_bits(row), mode="drop").view(old.dtype), rows, new)


def _bits(x: Array) -> Array:
    """fp8 as integers: CPUs have no fp8, and XLA would widen that a row or block is of."""
    return x.view(jnp.int8) if x.dtype == ROW_DTYPES["fp8"] else x


def row_bytes(head_dim: int, dtype: DTypeLike) -> int:
    """Bytes of one row, its scale included where the format has one."""
    dtype = jnp.dtype(dtype)
    return head_dim * dtype.itemsize + (4 if dtype in _LARGEST else 0)
