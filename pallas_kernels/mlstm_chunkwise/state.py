"""The memory of an mLSTM, shared by the contract and every back end."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float


@partial(jax.tree_util.register_dataclass, data_fields=["c_BKXY", "n_BKX", "m_BK"], meta_fields=[])
@dataclass(frozen=True)
class MLSTMState:
    """Matrix memory `c`, normaliser `n` and stabiliser `m` per row and head, all float32 (float64 for float64 inputs).

    `c` and `n` are stored in units of exp(m): the memory itself is `exp(m) * c`, whatever `m` is. So `m` is the choice
    of a unit, not a value: outputs do not depend on it and no gradient flows through it.
    """

    c_BKXY: Float[Array, "B K X Y"]
    n_BKX: Float[Array, "B K X"]
    m_BK: Float[Array, "B K"]


def mlstm_initial_state(
    batch: int, num_heads: int, key_dim: int, value_dim: int, dtype: DTypeLike = jnp.float32
) -> MLSTMState:
    """The empty memory: c = 0, n = 0, m = 0."""
    return MLSTMState(
        c_BKXY=jnp.zeros((batch, num_heads, key_dim, value_dim), dtype),
        n_BKX=jnp.zeros((batch, num_heads, key_dim), dtype),
        m_BK=jnp.zeros((batch, num_heads), dtype),
    )
