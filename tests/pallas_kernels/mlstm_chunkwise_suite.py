"""The suite every back end of `mlstm_chunkwise` runs: subclass `MLSTMChunkwiseSuite` and name the back end.

Two independent forms judge it, both here: the recurrence token by token, and the O(S^2) parallel form. Layouts share
their sizes and are arguments of the compiled functions, so that a new layout costs no compilation.
"""

from dataclasses import dataclass
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import BackendError
from pallas_kernels.mlstm_chunkwise import MLSTMState, mlstm_chunkwise, mlstm_initial_state, mlstm_step

LENGTH = 44
LAYOUTS = {  # rows of (segment, number of positions); segment 0 is padding
    "one_segment": [[(1, 44)], [(5, 44)], [(2, 44)]],
    "segments_inside_a_chunk": [[(1, 3), (2, 4), (3, 1), (4, 24), (5, 12)], [(3, 16), (1, 16), (2, 12)], [(9, 44)]],
    "padding_before_between_after": [[(0, 5), (1, 20), (0, 3), (2, 12), (0, 4)], [(0, 16), (3, 28)], [(4, 40), (0, 4)]],
    "padding_inside_a_segment": [[(1, 6), (0, 20), (1, 18)], [(0, 1), (1, 30), (0, 1), (1, 12)], [(1, 43), (0, 1)]],
    "an_id_that_comes_back": [[(1, 10), (2, 10), (1, 24)], [(2, 1), (1, 1), (2, 42)], [(1, 20), (2, 3), (1, 21)]],
    "rows_of_padding_only": [[(0, 44)], [(1, 44)], [(0, 44)]],
}


@dataclass(frozen=True)
class Sizes:
    """Heads, key and value dimension of the memory; how many rows of a layout there are, and how much longer."""

    heads: int = 2
    key_dim: int = 8
    value_dim: int = 16
    rows: int = 3
    scale: int = 1


SCORER = Sizes(heads=2, key_dim=64, value_dim=128)


def segment_ids(layout, sizes: Sizes = Sizes()) -> np.ndarray:
    rows = [[segment for segment, count in row for _ in range(count * sizes.scale)] for row in layout[: sizes.rows]]
    return np.array(rows, np.int32)


def random_layout(seed: int):
    """Three rows of up to five pieces each, about a third of them padding; ids may repeat."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(3):
        cuts = np.sort(rng.choice(np.arange(1, LENGTH), size=int(rng.integers(0, 5)), replace=False))
        pieces = np.diff(np.concatenate([[0], cuts, [LENGTH]]))
        rows.append([(int(rng.integers(0, 3)), int(count)) for count in pieces])
    return rows


def random_inputs(seed: int, sizes: Sizes = Sizes(), dtype=jnp.float32):
    """(q, k, v, i, f, state). Gates span forgetting at once to hardly ever, and weights from e^-6 to e^6."""
    rng = np.random.default_rng(seed)
    B, S, K, X, Y = sizes.rows, LENGTH * sizes.scale, sizes.heads, sizes.key_dim, sizes.value_dim

    def normal(*shape, scale=1.0, shift=0.0, to=dtype):
        return jnp.asarray(rng.normal(size=shape) * scale + shift, to)

    state = jax.tree.map(lambda leaf: normal(*leaf.shape, to=leaf.dtype), mlstm_initial_state(B, K, X, Y))
    state = MLSTMState(state.c_BKXY, state.n_BKX, jnp.abs(state.m_BK))
    q, k, v = normal(B, S, K, X, scale=X**-0.5), normal(B, S, K, X), normal(B, S, K, Y)
    return q, k, v, normal(B, S, K, scale=2.0), normal(B, S, K, scale=3.0, shift=2.0), state


def run_numbers(segment_BS) -> np.ndarray:
    """Row by row and token by token: 0 for the first segment, 1 for the next, ...; -1 for padding."""
    numbers = np.full(segment_BS.shape, -1)
    for b, row in enumerate(segment_BS):
        number, current = -1, None
        for t, segment in enumerate(row):
            if segment != 0:
                number += segment != current
                current, numbers[b, t] = segment, number
    return numbers


def parallel_form(q, k, v, i, f, state, run_BS):
    """The memory without recurrence: every position sums over all earlier ones, weights in an S x S array."""
    real, S = run_BS >= 0, run_BS.shape[1]
    total = jnp.cumsum(jnp.where(real[..., None], jax.nn.log_sigmoid(f), 0.0), axis=1)
    visible = (run_BS[:, :, None] == run_BS[:, None, :]) & real[:, :, None] & np.tril(np.ones((S, S), bool))
    log_weight = jnp.where(visible[..., None], total[:, :, None] - total[:, None] + i[:, None], -jnp.inf)
    log_state = jnp.where((run_BS == 0)[..., None], total + jax.lax.stop_gradient(state.m_BK)[:, None], -jnp.inf)
    m = jax.lax.stop_gradient(jnp.maximum(jnp.max(log_weight, axis=2), log_state).clip(min=0))
    scores = jnp.einsum("bskx,btkx->bstk", q, k) * jnp.exp(log_weight - m[:, :, None])
    carried = jnp.exp(log_state - m)
    total_v = jnp.einsum("bstk,btky->bsky", scores, v)
    total_v += carried[..., None] * jnp.einsum("bskx,bkxy->bsky", q, state.c_BKXY)
    total_n = scores.sum(axis=2) + carried * jnp.einsum("bskx,bkx->bsk", q, state.n_BKX)
    h = total_v / (jnp.maximum(jnp.abs(total_n), jnp.exp(-m)) + 1e-6)[..., None]
    return jnp.where(real[..., None, None], h, 0), recurrent_form(q, k, v, i, f, state, run_BS)[1]


def recurrent_form(q, k, v, i, f, state, run_BS):
    """The recurrence, one `mlstm_step` a token; padding is not stepped, a new segment starts from the empty state."""
    empty = jax.tree.map(jnp.zeros_like, state)

    def body(carry, token):
        state, current_B = carry
        *inputs, run_B = token
        after, h_BKY = mlstm_step(pick(run_B > current_B, empty, state), *inputs)
        carry = pick(run_B >= 0, after, state), jnp.maximum(current_B, run_B)
        return carry, jnp.where((run_B >= 0)[:, None, None], h_BKY, 0)

    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (q, k, v, i, f, run_BS))
    (state, _), h = jax.lax.scan(body, (state, jnp.zeros_like(run_BS[:, 0])), tokens)
    return jnp.moveaxis(h, 0, 1), state


def pick(which_B, yes, no):
    return jax.tree.map(lambda a, b: jnp.where(which_B.reshape(-1, *[1] * (a.ndim - 1)), a, b), yes, no)


@partial(jax.jit, static_argnums=0)
def _with_gradients(form, inputs, layout_BS, weights):
    def loss(inputs):
        h, state = form(*inputs, layout_BS)
        unit_BK = jnp.exp(jax.lax.stop_gradient(state.m_BK))
        memory = (h, state.c_BKXY * unit_BK[..., None, None], state.n_BKX * unit_BK[..., None])
        scales = jax.tree.map(lambda a: jax.lax.stop_gradient(_power_of_two(a)), memory)
        terms = jax.tree.map(lambda w, a, scale: jnp.sum(w * (a / scale)), weights, memory, scales)
        return sum(terms).astype(unit_BK.dtype), (h, state)

    gradients, outputs = jax.grad(loss, has_aux=True)(inputs)
    return outputs, gradients


def _power_of_two(array):
    """The next one above the array's largest magnitude, 1 at least."""
    return jnp.exp2(jnp.ceil(jnp.log2(jnp.max(jnp.abs(array), initial=1.0).astype(jnp.float32)))).astype(array.dtype)


def with_gradients(form, inputs, layout_BS):
    """Read-outs, final state, and the gradients of a random functional of both (of `m` only as the unit it is).

    What the functional hands to the gradient is a bfloat16 number divided by a power of two, so it is the same number
    in every dtype: read-outs nearly cancel in gradients, and would make much of a rounding here.
    """
    rng = np.random.default_rng(0)
    state = inputs[-1]
    weights = tuple(
        jnp.asarray(rng.normal(size=a.shape), jnp.bfloat16).astype(a.dtype)
        for a in (inputs[2], state.c_BKXY, state.n_BKX)
    )
    return _with_gradients(form, inputs, jnp.asarray(layout_BS), weights)


def in_float64(form, inputs, layout_BS):
    """`with_gradients` in float64, on the very values that `inputs` hold."""
    with jax.enable_x64(True):
        return with_gradients(form, jax.tree.map(lambda a: a.astype(jnp.float64), inputs), layout_BS)


@cache
def truth(name: str, sizes: Sizes = Sizes()):
    """The recurrent form in float64, computed once for all tests of a layout."""
    return in_float64(recurrent_form, random_inputs(1, sizes), run_numbers(segment_ids(LAYOUTS[name], sizes)))


def largest_error(actual, expected) -> float:
    """Over all arrays: the largest difference, relative to the array's largest magnitude (1 at least)."""

    def error(a, e):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        return float(np.max(np.abs(a - e)) / max(1.0, np.max(np.abs(e))))

    return max(jax.tree.leaves(jax.tree.map(error, actual, expected)))


@cache
def chunkwise_form(backend: str, chunk: int):
    """The same function object for the same arguments, so that it is compiled once for all tests."""
    return jax.jit(partial(mlstm_chunkwise, chunk=chunk, backend=backend))


class MLSTMChunkwiseSuite:
    """What any back end must satisfy."""

    backend: str
    sizes = Sizes()
    scorer = SCORER
    float32_bound = 1e-5
    bfloat16_bound = 5e-3  # results are rounded to bfloat16, by up to 2**-8

    def form(self, chunk: int = 16):
        return chunkwise_form(self.backend, chunk)

    def segments(self, name: str):
        return segment_ids(LAYOUTS[name], self.sizes)

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_float32_stays_within_its_error_of_float64(self, name):
        inputs, segment_BS = random_inputs(1, self.sizes), self.segments(name)
        actual = with_gradients(self.form(), inputs, segment_BS)
        assert largest_error(actual, truth(name, self.sizes)) < self.float32_bound

    def test_no_given_state_is_the_empty_state(self):
        *inputs, state = random_inputs(2, self.sizes)
        segment_BS = self.segments("segments_inside_a_chunk")
        none = self.form()(*inputs, None, segment_BS)
        chex.assert_trees_all_equal(none, self.form()(*inputs, jax.tree.map(jnp.zeros_like, state), segment_BS))

    @pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, "float32_bound"), (jnp.bfloat16, "bfloat16_bound")])
    def test_sizes_of_a_scorer_in_every_input_dtype(self, dtype, bound):
        inputs = random_inputs(3, self.scorer, dtype)
        segment_BS = segment_ids(LAYOUTS["padding_before_between_after"], self.scorer)
        outputs, gradients = with_gradients(self.form(), inputs, segment_BS)
        chex.assert_trees_all_equal_shapes_and_dtypes(gradients, inputs)
        chex.assert_trees_all_equal_shapes_and_dtypes(outputs, (inputs[2], inputs[-1]))
        expected = in_float64(recurrent_form, inputs, run_numbers(segment_BS))
        assert largest_error((outputs, gradients), expected) < getattr(self, bound)

    @pytest.mark.core
    @pytest.mark.parametrize("cut", [1, 7, 16, 31])
    def test_a_state_carried_across_two_calls_equals_one_call(self, cut):
        *inputs, state = random_inputs(4, self.sizes)
        segment_BS = self.segments("segments_inside_a_chunk")
        whole = self.form()(*inputs, state, segment_BS)
        cut *= self.sizes.scale
        here = np.arange(segment_BS.shape[1]) < cut
        first, between = self.form()(*inputs, state, np.where(here, segment_BS, 0))
        # A state continues the first segment it meets: where a segment ends at the cut, the caller restarts it.
        goes_on_B = segment_BS[:, cut - 1] == segment_BS[:, cut]
        between = pick(goes_on_B, between, jax.tree.map(jnp.zeros_like, between))
        second, final = self.form()(*inputs, between, np.where(here, 0, segment_BS))
        chex.assert_trees_all_close((first + second, final), whole, rtol=1e-4, atol=1e-5)

    @pytest.mark.core
    def test_padding_changes_neither_the_read_outs_nor_the_final_state(self):
        *inputs, state = random_inputs(5, self.sizes)
        segment_BS = segment_ids([[(1, 20), (2, 4), (0, 20)]] * 3, self.sizes)
        h, final = self.form()(*inputs, state, segment_BS)
        move = 13 * self.sizes.scale
        moved = (jnp.roll(a, move, axis=1) for a in inputs)
        real_S = np.roll(segment_BS[0], move) > 0
        moved = (jnp.where(real_S.reshape(-1, *[1] * (a.ndim - 2)), a, 50.0) for a in moved)
        moved_h, moved_final = self.form()(*moved, state, np.roll(segment_BS, move, axis=1))
        chex.assert_trees_all_close((jnp.roll(moved_h, -move, axis=1), moved_final), (h, final), rtol=1e-4, atol=1e-5)
        assert not moved_h[:, ~real_S].any()

    def test_rows_of_padding_keep_their_state_and_take_no_gradient(self):
        inputs = random_inputs(6, self.sizes)
        segment_BS = self.segments("rows_of_padding_only")
        (_, final), gradients = with_gradients(self.form(), inputs, segment_BS)
        chex.assert_trees_all_equal(*(jax.tree.map(lambda a: a[::2], state) for state in (final, inputs[-1])))
        assert not any(gradient[::2].any() for gradient in gradients[:5])

    @pytest.mark.core
    def test_a_segment_sees_nothing_of_its_neighbours(self):
        q, k, v, i, f, state = random_inputs(7, self.sizes)
        segment_BS = self.segments("segments_inside_a_chunk")
        own_BS = run_numbers(segment_BS) == 1
        before = self.form()(q, k, v, i, f, state, segment_BS)[0]
        k, v = (jnp.where(own_BS[..., None, None], a, 3.0 - a) for a in (k, v))
        i, f = (jnp.where(own_BS[..., None], a, 1.0 - a) for a in (i, f))
        after = self.form()(q, k, v, i, f, state, segment_BS)[0]
        chex.assert_trees_all_close(after[own_BS], before[own_BS], rtol=1e-5, atol=1e-6)

    def test_the_unit_of_the_given_state_does_not_matter(self):
        *inputs, state = random_inputs(8, self.sizes)
        segment_BS = self.segments("one_segment")
        other = MLSTMState(state.c_BKXY * jnp.exp(-3.0), state.n_BKX * jnp.exp(-3.0), state.m_BK + 3.0)
        h, other_h = (self.form()(*inputs, given, segment_BS)[0] for given in (state, other))
        assert largest_error(other_h, h) < 1e-4

    @pytest.mark.parametrize("size", [80.0, 1e4])
    def test_extreme_gates_neither_overflow_nor_give_nan(self, size):
        q, k, v, i, f, state = random_inputs(9, self.sizes)
        segment_BS = self.segments("padding_before_between_after")
        outputs, back = jax.vjp(lambda *args: self.form()(*args, segment_BS), q, k, v, i * size, f * size, state)
        chex.assert_tree_all_finite((outputs, back(jax.tree.map(jnp.ones_like, outputs))))

    def test_an_unknown_backend_and_a_chunk_below_one_are_refused(self):
        inputs, segment_BS = random_inputs(10, self.sizes), self.segments("one_segment")
        with pytest.raises(BackendError, match="nonesuch"):
            mlstm_chunkwise(*inputs, segment_BS, backend="nonesuch")
        with pytest.raises(ValueError, match="chunk=0"):
            self.form(chunk=0)(*inputs, segment_BS)
