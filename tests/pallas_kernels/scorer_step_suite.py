"""The suite every back end of `scorer_step` runs: subclass `ScorerStepSuite` and name the back end.

The judge is the recurrence in NumPy and float64, from the equations of the contract.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import assert_close

from pallas_kernels.leaving import Leaving
from pallas_kernels.mlstm_chunkwise import MLSTMState
from pallas_kernels.scorer_step import ScorerWeights, scorer_step

SOFT_CAP, DECAY_MAX = 5.0, 0.2
BOUNDS = {"soft_cap": SOFT_CAP, "decay_max": DECAY_MAX}
SLOTS, WINDOW = 12, 5


@dataclass(frozen=True)
class Case:
    """Rows, KV heads, and the sizes of the model's layer and of the memory."""

    batch: int
    heads: int
    hidden: int
    dtype: str
    head_dim: int = 128
    key_dim: int = 64
    value_dim: int = 128


CASES = {
    "six_rows_of_two_heads": Case(batch=6, heads=2, hidden=1088, dtype="float32"),
    "one_row_of_one_head": Case(batch=1, heads=1, hidden=64, dtype="bfloat16"),
    "nine_heads": Case(batch=1, heads=9, hidden=128, dtype="bfloat16"),
    "seventeen_rows": Case(batch=17, heads=1, hidden=64, dtype="bfloat16"),
    "seventeen_rows_in_float32": Case(batch=17, heads=1, hidden=64, dtype="float32"),
}


def random_inputs(case: Case, seed: int = 0):
    """(weights, state, hidden, k, v, leaving); raw gates reach past the soft cap.

    Every third row and head has lost the leaving token, the first of these with a ring that names no slot; no token
    leaves the last of several rows yet, though a slot is empty.
    """
    rng = np.random.default_rng(seed)
    B, K, E, D, X, Y = case.batch, case.heads, case.hidden, case.head_dim, case.key_dim, case.value_dim

    def normal(*shape, scale=1.0, dtype="float32"):
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    maps = (normal(K, 2 * D, n, scale=(2 * D) ** -0.5) for n in (X, X, Y))
    gates = normal(E, 2, K, scale=4 * E**-0.5), normal(2, K, scale=4)
    weights = ScorerWeights(*maps, *gates, normal(K, Y), normal(K), normal(K) - 2)
    state = MLSTMState(normal(B, K, X, Y), normal(B, K, X), jnp.abs(normal(B, K)))
    # Not of unit size, and the cached tokens of another size than the new one.
    new = (normal(B, K, D, scale=scale, dtype=case.dtype) for scale in (3, 0.1))
    cached = (normal(B, K, SLOTS, D, scale=scale, dtype=case.dtype) for scale in (0.2, 7))

    leaving_B = rng.integers(0, 50, size=B)
    leaving_B[1:][-1:] = -1
    # All other tokens are younger, at odd distances.
    position_BKC = leaving_B[:, None, None] + 1 + 2 * rng.permuted(np.tile(np.arange(SLOTS), (B, K, 1)), axis=-1)
    ring_BKW = rng.integers(0, SLOTS, size=(B, K, WINDOW))
    for n, (row, head) in enumerate(np.ndindex(B, K)):
        slot = ring_BKW[row, head, leaving_B[row] % WINDOW]
        if n % 3 != 2:
            position_BKC[row, head, slot] = leaving_B[row]
        elif n == 2:
            ring_BKW[row, head, leaving_B[row] % WINDOW] = SLOTS
    position_B, *numbers = (jnp.asarray(x, jnp.int32) for x in (leaving_B, position_BKC, ring_BKW))
    return weights, state, normal(B, E, dtype=case.dtype), *new, Leaving(position_B + WINDOW, *cached, *numbers)


def by_the_equations(weights, state, hidden_BE, k_BKD, v_BKD, leaving):
    """The state and the priority, in float64."""
    leaving_B = leaving.arriving_B - WINDOW
    leaving_k_BKD, leaving_v_BKD = np.zeros_like(k_BKD), np.zeros_like(v_BKD)
    for row, head in np.ndindex(k_BKD.shape[:2]):
        held = np.flatnonzero(leaving.position_BKC[row, head] == leaving_B[row])
        if leaving_B[row] >= 0 and held.size:
            leaving_k_BKD[row, head] = leaving.k_BKCD[row, head, held[0]]
            leaving_v_BKD[row, head] = leaving.v_BKCD[row, head, held[0]]

    def unit(x):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)

    x_BKI = np.concatenate([unit(k_BKD), unit(v_BKD)], axis=-1)
    leaving_BKI = np.concatenate([unit(leaving_k_BKD), unit(leaving_v_BKD)], axis=-1)
    q_BKX = np.einsum("bki,kix->bkx", leaving_BKI, weights.q_KIX) / np.sqrt(weights.q_KIX.shape[2])
    k_BKX, v_BKY = (np.einsum("bki,kio->bko", x_BKI, w) for w in (weights.k_KIX, weights.v_KIY))
    raw_B2K = np.einsum("be,egk->bgk", hidden_BE, weights.gates_E2K) + weights.gate_bias_2K
    i_BK, f_BK = np.moveaxis(SOFT_CAP * np.tanh(raw_B2K / SOFT_CAP), 1, 0)
    kept_BK = state.m_BK - np.logaddexp(0, -f_BK)
    m_BK = np.maximum(np.maximum(kept_BK, i_BK), 0)
    forget_BK1, write_BK1 = np.exp(kept_BK - m_BK)[..., None], np.exp(i_BK - m_BK)[..., None]
    n_BKX = forget_BK1 * state.n_BKX + write_BK1 * k_BKX
    c_BKXY = forget_BK1[..., None] * state.c_BKXY + (write_BK1 * k_BKX)[..., None] * v_BKY[:, :, None]
    norm_BK = np.maximum(np.abs(np.sum(q_BKX * n_BKX, axis=-1)), np.exp(-m_BK)) + 1e-6
    h_BKY = np.einsum("bkx,bkxy->bky", q_BKX, c_BKXY) / norm_BK[..., None]
    score_BK = np.sum(unit(h_BKY) * weights.out_KY, axis=-1) + weights.out_bias_K
    age_BK = np.minimum(np.exp(weights.log_decay_K), DECAY_MAX) * leaving_B[:, None]
    return MLSTMState(c_BKXY, n_BKX, m_BK), score_BK + age_BK


def to_float64(inputs, asarray):
    """The inputs in float64, and positions as they are."""
    return jax.tree.map(lambda x: asarray(x, x.dtype if x.dtype == jnp.int32 else np.float64), inputs)


def assert_all_close(actual, expected, tolerance):
    for got, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(np.asarray(got), np.asarray(wanted), tolerance)


class ScorerStepSuite:
    """What any back end must satisfy."""

    backend: str
    tolerance = 2**-17

    @pytest.mark.parametrize("name", CASES)
    def test_state_and_priority_are_those_of_the_equations(self, name):
        inputs = random_inputs(CASES[name])
        actual = jax.jit(partial(scorer_step, **BOUNDS, backend=self.backend))(*inputs)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(actual))
        expected = by_the_equations(*to_float64(inputs, np.asarray))
        assert_all_close(actual, expected, self.tolerance)
