"""Pallas TPU `mlstm_chunkwise`: the chunkwise form, the memory carried in VMEM from chunk to chunk.

A row is one head of one batch row. The grid walks rows, then chunks of L positions in order (backwards for the
gradient). In VMEM are the chunk's q, k, v and gates, a few L x L arrays, and the memory c, n, m; the forward pass also
writes out the memory that enters each chunk if a gradient is to follow, (S / L) X Y numbers a row.

Segments, padding and the sums over log forget gates never reach the kernels. They are in the log weights that XLA makes
beforehand, -inf where something is not to be seen; with b the running sum of f in the chunk, and lane 0 for CARRY:

    COARSE, FINE  b_t, see `sums`       I     i_t                          RUN   number of the segment, -1 for padding
    ENTER  b_t, in the chunk's first segment, if it continues       WRITE  b_L - b_t + i_t, in the last segment
    CARRY  b_L, if one segment continues through the whole chunk

Their gradients come back in the same places, and XLA takes them from there. The unit m takes no gradient anywhere.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mlstm_chunkwise.reference import EPSILON, segment_runs
from pallas_kernels.mlstm_chunkwise.state import MLSTMState
from pallas_kernels.mlstm_chunkwise.sums import RunningSum

SUBLANES = 8
COARSE, FINE, I, RUN, ENTER, WRITE, CARRY = range(7)
MINUS_INFINITY = float("-inf")
LARGEST_CHUNK = 256


def refuses(q_BSKX, k_BSKX, v_BSKY, i_BSK, f_BSK, state, segment_BS, chunk) -> str | None:
    """Why the kernels cannot take these arguments, in one line; None if they can."""
    arrays = q_BSKX, k_BSKX, v_BSKY, i_BSK, f_BSK, *jax.tree.leaves(state)
    dtypes = {str(array.dtype) for array in arrays} - {"float32", "bfloat16"}
    if dtypes:
        return f"takes float32 and bfloat16, not {', '.join(sorted(dtypes))}"
    if max(q_BSKX.shape[-1], v_BSKY.shape[-1]) > 256:
        return f"takes key and value dimensions up to 256, not {q_BSKX.shape[-1]} and {v_BSKY.shape[-1]}"
    return None


def mlstm_chunkwise(
    q_BSKX: Float[Array, "B S K X"],
    k_BSKX: Float[Array, "B S K X"],
    v_BSKY: Float[Array, "B S K Y"],
    i_BSK: Float[Array, "B S K"],
    f_BSK: Float[Array, "B S K"],
    state: MLSTMState,
    segment_BS: Int[Array, "B S"],
    chunk: int,
):
    """See `api.mlstm_chunkwise`."""
    batch, S, K, Y = v_BSKY.shape
    X, R = q_BSKX.shape[-1], batch * K
    L = pl.cdiv(min(chunk, S, LARGEST_CHUNK), SUBLANES) * SUBLANES
    gates_RnGL = _log_weights(i_BSK, f_BSK, segment_BS, L)

    def rows(array_BSKD):
        array_BKSD = jnp.swapaxes(jnp.pad(array_BSKD, ((0, 0), (0, -S % L), (0, 0), (0, 0))), 1, 2)
        return array_BKSD.reshape(R, -1, array_BSKD.shape[-1])

    stored = state.c_BKXY.reshape(R, X, Y), state.n_BKX.reshape(R, 1, X), state.m_BK.reshape(R, 1, 1)
    memory = [array.astype(jnp.float32) for array in stored]
    inputs = rows(q_BSKX), rows(k_BSKX), rows(v_BSKY), gates_RnGL
    h_RSY, c_RXY, n_R1X, m_R11 = _run(*inputs, *memory)
    h_BSKY = jnp.swapaxes(h_RSY.reshape(batch, K, -1, Y), 1, 2)[:, :S]
    final = MLSTMState(c_RXY.reshape(batch, K, X, Y), n_R1X.reshape(batch, K, X), m_R11.reshape(batch, K))
    return h_BSKY, final


def _log_weights(i_BSK, f_BSK, segment_BS, L):
    """The gates of every chunk as the kernels read them, [R, chunks, SUBLANES, L] float32."""
    S = segment_BS.shape[1]

    def chunks(array_BSK):
        padded = jnp.pad(array_BSK, ((0, 0), (0, -S % L), (0, 0)))
        return jnp.moveaxis(padded.reshape(padded.shape[0], -1, L, padded.shape[-1]), 3, 1)  # [B, K, n, L]

    run_BnL, real_BnL = (chunks(array[..., None])[:, 0] for array in (segment_runs(segment_BS), segment_BS != 0))
    last_Bn = lax.cummax(jnp.max(run_BnL, axis=-1), axis=1)
    entering_Bn = jnp.pad(last_Bn, ((0, 0), (1, 0)))[:, :-1]
    i_BKnL, f_BKnL = (chunks(array.astype(jnp.float32)) for array in (i_BSK, f_BSK))
    # Padding forgets nothing.
    b_BKnL = RunningSum.of(jnp.where(real_BnL[:, None], jax.nn.log_sigmoid(f_BKnL), 0.0))
    continues_BnL = real_BnL & (run_BnL == entering_Bn[..., None])
    in_last_BnL = real_BnL & (run_BnL == last_Bn[..., None])
    kinds = {
        COARSE: b_BKnL.coarse,
        FINE: b_BKnL.fine,
        I: i_BKnL,
        RUN: jnp.where(real_BnL, run_BnL, -1).astype(jnp.float32)[:, None],
        ENTER: jnp.where(continues_BnL[:, None], b_BKnL.coarse + b_BKnL.fine, MINUS_INFINITY),
        WRITE: jnp.where(in_last_BnL[:, None], b_BKnL.to_end() + i_BKnL, MINUS_INFINITY),
        CARRY: jnp.where((entering_Bn == last_Bn)[:, None, :, None], b_BKnL.end[..., None], MINUS_INFINITY),
    }
    stacked = [jnp.broadcast_to(kinds.get(kind, 0.0), i_BKnL.shape) for kind in range(SUBLANES)]
    return jnp.stack(stacked, axis=3).reshape(-1, i_BKnL.shape[2], SUBLANES, L)


@jax.custom_vjp
def _run(q_RSX, k_RSX, v_RSY, gates_RnGL, c_RXY, n_R1X, m_R11):
    return _forward(q_RSX, k_RSX, v_RSY, gates_RnGL, c_RXY, n_R1X, m_R11, keep=False)


def _run_and_keep(*arguments):
    h_RSY, *final, c_RnXY, n_Rn1X, m_Rn11 = _forward(*arguments, keep=True)
    return (h_RSY, *final), (arguments[:4], (c_RnXY, n_Rn1X, m_Rn11), final[2])


def _gradients(kept, cotangents):
    inputs, entering, m_R11 = kept
    dh_RSY, dc_RXY, dn_R1X, _dm_R11 = cotangents
    return *_backward(*inputs, *entering, m_R11, dh_RSY, dc_RXY, dn_R1X), jnp.zeros_like(m_R11)


_run.defvjp(_run_and_keep, _gradients)


def _specs(inputs, at):
    """How a step reads q, k, v and gates; `at` takes the step to the chunk."""
    q_RSX, _, v_RSY, gates_RnGL = inputs
    (X, Y), (n, G, L) = (q_RSX.shape[-1], v_RSY.shape[-1]), gates_RnGL.shape[1:]

    def stretch(D):
        return pl.BlockSpec((None, L, D), lambda r, c: (r, at(c, n), 0))

    def of_chunk(*shape):
        return pl.BlockSpec((None, None, *shape), lambda r, c: (r, at(c, n), 0, 0))

    def of_row(*shape):
        return pl.BlockSpec((None, *shape), lambda r, c: (r, 0, 0))

    memory = (X, Y), (1, X), (1, 1)
    return {
        "inputs": [stretch(X), stretch(X), stretch(Y), of_chunk(G, L)],
        "read_outs": stretch(Y),
        "memory": [of_row(*shape) for shape in memory],
        "entering": [of_chunk(*shape) for shape in memory],
    }


def _cost(inputs, products, extra_bytes):
    """`products` of an L x L x D kind and as many of an L x X x Y kind."""
    q_RSX, _, v_RSY, gates_RnGL = inputs
    (R, S, X), Y, L = q_RSX.shape, v_RSY.shape[-1], gates_RnGL.shape[-1]
    return pl.CostEstimate(
        flops=R * S * products * (L * (X + Y) + 2 * X * Y),
        transcendentals=R * S * (L + 2),
        bytes_accessed=extra_bytes + sum(array.size * array.dtype.itemsize for array in inputs),
    )


def _forward(q_RSX, k_RSX, v_RSY, gates_RnGL, c_RXY, n_R1X, m_R11, *, keep):
    inputs, memory = (q_RSX, k_RSX, v_RSY, gates_RnGL), (c_RXY, n_R1X, m_R11)
    R, n = gates_RnGL.shape[:2]
    specs = _specs(inputs, lambda c, n: c)
    float32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    out_shape = [jax.ShapeDtypeStruct(v_RSY.shape, v_RSY.dtype), *(float32(array.shape) for array in memory)]
    out_specs = [specs["read_outs"], *specs["memory"]]
    if keep:
        out_shape += [float32((R, n, *array.shape[1:])) for array in memory]
        out_specs += specs["entering"]
    return pl.pallas_call(
        partial(_forward_kernel, keep=keep),
        grid=(R, n),
        in_specs=[*specs["inputs"], *specs["memory"]],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM(array.shape[1:], jnp.float32) for array in memory],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(inputs, 2, v_RSY.size * 4 + (n * keep + 2) * c_RXY.size * 4),
        name="mlstm_chunkwise_forward",
    )(*inputs, *memory)


def _forward_kernel(q, k, v, gates, c_given, n_given, m_given, h, c_final, n_final, m_final, *rest, keep):
    entering, (c, n, m) = rest[:-3], rest[-3:]

    @pl.when(pl.program_id(1) == 0)
    def _():
        for carried, given in ((c, c_given), (n, n_given), (m, m_given)):
            carried[...] = given[...]

    if keep:
        for out, carried in zip(entering, (c, n, m), strict=True):
            out[...] = carried[...]
    q_LX, k_LX, v_LY = (ref[...].astype(jnp.float32) for ref in (q, k, v))
    chunk = _Chunk(gates[...], m[...])
    scores_LL = _dot(q_LX, k_LX, 1, 1) * chunk.token_LL
    sum_LY = _dot(scores_LL, v_LY, 1, 0) + chunk.memory_L1 * _dot(q_LX, c[...], 1, 0)
    total_L1 = _across(scores_LL) + chunk.memory_L1 * _across(q_LX * n[...])
    h[...] = (sum_LY / (jnp.maximum(jnp.abs(total_L1), chunk.bound_L1) + EPSILON)).astype(h.dtype)

    written_LX = chunk.write_L1 * k_LX
    c[...] = chunk.carry_11 * c[...] + _dot(written_LX, v_LY, 0, 0)
    n[...] = chunk.carry_11 * n[...] + jnp.sum(written_LX, axis=0, keepdims=True)
    m[...] = chunk.after_11

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        for out, carried in ((c_final, c), (n_final, n), (m_final, m)):
            out[...] = carried[...]


def _backward(q_RSX, k_RSX, v_RSY, gates_RnGL, c_RnXY, n_Rn1X, m_Rn11, m_R11, dh_RSY, dc_RXY, dn_R1X):
    inputs, entering = (q_RSX, k_RSX, v_RSY, gates_RnGL), (c_RnXY, n_Rn1X, m_Rn11)
    R, n = gates_RnGL.shape[:2]
    specs = _specs(inputs, lambda c, n: n - 1 - c)
    of_memory = specs["memory"][:2]
    given = dc_RXY, dn_R1X
    return pl.pallas_call(
        _backward_kernel,
        grid=(R, n),
        in_specs=[*specs["inputs"], *specs["entering"], specs["read_outs"], *of_memory],
        out_specs=[*specs["inputs"], *of_memory],
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (*inputs, *given)],
        scratch_shapes=[pltpu.VMEM(array.shape[1:], jnp.float32) for array in given],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(inputs, 5, (v_RSY.size + c_RnXY.size) * 4 + sum(array.size * 4 for array in inputs)),
        name="mlstm_chunkwise_backward",
    )(*inputs, *entering, dh_RSY, *given)


def _backward_kernel(
    q, k, v, gates, c, n, m, dh, dc_given, dn_given, dq, dk, dv, dgates, dc_out, dn_out, dc_after, dn_after
):
    @pl.when(pl.program_id(1) == 0)
    def _():
        dc_after[...], dn_after[...] = dc_given[...], dn_given[...]

    q_LX, k_LX, v_LY, dh_LY = (ref[...].astype(jnp.float32) for ref in (q, k, v, dh))
    c_XY, n_1X, dc_XY, dn_1X = c[...], n[...], dc_after[...], dn_after[...]
    chunk = _Chunk(gates[...], m[...])
    memory_L1, write_L1, carry_11 = chunk.memory_L1, chunk.write_L1, chunk.carry_11

    # The read-outs again, and back through the division.
    scores_LL = _dot(q_LX, k_LX, 1, 1) * chunk.token_LL
    from_c_LY, from_n_L1 = _dot(q_LX, c_XY, 1, 0), _across(q_LX * n_1X)
    total_L1 = _across(scores_LL) + memory_L1 * from_n_L1
    divisor_L1 = jnp.maximum(jnp.abs(total_L1), chunk.bound_L1) + EPSILON
    dsum_LY = dh_LY / divisor_L1
    h_LY = (_dot(scores_LL, v_LY, 1, 0) + memory_L1 * from_c_LY) / divisor_L1
    dtotal_L1 = jnp.where(jnp.abs(total_L1) > chunk.bound_L1, -_across(dsum_LY * h_LY) * jnp.sign(total_L1), 0.0)

    # Through the tokens of the chunk.
    dscores_LL = _dot(dsum_LY, v_LY, 1, 1) + dtotal_L1
    dweight_LL = dscores_LL * scores_LL
    dproduct_LL = dscores_LL * chunk.token_LL
    # Through the memory that entered.
    dq_LX = _dot(dproduct_LL, k_LX, 1, 0)
    dq_LX += memory_L1 * (_dot(dsum_LY, c_XY, 1, 1) + dtotal_L1 * n_1X)
    denter_L1 = memory_L1 * (_across(dsum_LY * from_c_LY) + dtotal_L1 * from_n_L1)
    # Through what the chunk wrote into the memory that left.
    from_dc_LX, to_dc_LY = _dot(v_LY, dc_XY, 1, 1) + dn_1X, _dot(k_LX, dc_XY, 1, 0)
    dwrite_L1 = write_L1 * _across(from_dc_LX * k_LX)
    dcarry_11 = carry_11 * (_total(dc_XY * c_XY) + _total(dn_1X * n_1X))

    dq[...] = dq_LX.astype(dq.dtype)
    dk[...] = (_dot(dproduct_LL, q_LX, 0, 0) + write_L1 * from_dc_LX).astype(dk.dtype)
    dv[...] = (_dot(scores_LL, dsum_LY, 0, 0) + write_L1 * to_dc_LY).astype(dv.dtype)
    dc_after[...] = carry_11 * dc_XY + _dot(memory_L1 * q_LX, dsum_LY, 0, 0)
    dn_after[...] = carry_11 * dn_1X + jnp.sum(memory_L1 * q_LX * dtotal_L1, axis=0, keepdims=True)

    L = gates.shape[-1]
    column_1G = lax.broadcasted_iota(jnp.int32, (1, SUBLANES), 1)
    columns = (FINE, _across(dweight_LL)), (ENTER, denter_L1), (WRITE, dwrite_L1)
    from_columns_LG = sum(jnp.where(column_1G == kind, column_L1, 0.0) for kind, column_L1 in columns)
    row_G1, lane_1L = (
        lax.broadcasted_iota(jnp.int32, shape, axis) for axis, shape in enumerate(((SUBLANES, 1), (1, L)))
    )
    earlier_1L = jnp.sum(dweight_LL, axis=0, keepdims=True)
    from_rows_GL = jnp.where(row_G1 == I, earlier_1L, jnp.where(row_G1 == FINE, -earlier_1L, 0.0))
    from_rows_GL += jnp.where((row_G1 == CARRY) & (lane_1L == 0), dcarry_11, 0.0)
    dgates[...] = from_columns_LG.T + from_rows_GL

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        dc_out[...], dn_out[...] = dc_after[...], dn_after[...]


class _Chunk:
    """The weights of a chunk, from its log weights and the unit of the memory that enters.

    In units of the read-out of each position: `token_LL` of earlier tokens, `memory_L1` of the memory, `bound_L1` the
    least divisor. In units of the memory that leaves, `after_11`: `write_L1` of each token, `carry_11` of the memory.
    """

    def __init__(self, gates_GL, m_11):
        gates_LG, L = gates_GL.T, gates_GL.shape[-1]

        def row(kind):
            return gates_GL[kind : kind + 1]

        def column(kind):
            return gates_LG[:, kind : kind + 1]

        earlier_LL = lax.broadcasted_iota(jnp.int32, (L, L), 0) >= lax.broadcasted_iota(jnp.int32, (L, L), 1)
        seen_LL = earlier_LL & (column(RUN) == row(RUN)) & (column(RUN) >= 0.0)
        between_LL = (column(COARSE) - row(COARSE)) + (column(FINE) - row(FINE))
        log_token_LL = jnp.where(seen_LL, between_LL + row(I), MINUS_INFINITY)
        log_memory_L1 = column(ENTER) + m_11
        unit_L1 = jnp.maximum(jnp.maximum(jnp.max(log_token_LL, axis=1, keepdims=True), log_memory_L1), 0.0)
        self.token_LL = jnp.exp(log_token_LL - unit_L1)
        self.memory_L1 = jnp.exp(log_memory_L1 - unit_L1)
        self.bound_L1 = jnp.exp(-unit_L1)

        log_carry_11 = gates_GL[CARRY : CARRY + 1, 0:1] + m_11
        largest_11 = jnp.max(row(WRITE), axis=1, keepdims=True)
        self.after_11 = jnp.maximum(jnp.maximum(log_carry_11, largest_11), 0.0)
        self.write_L1 = jnp.exp(column(WRITE) - self.after_11)
        self.carry_11 = jnp.exp(log_carry_11 - self.after_11)


def _across(array):
    return jnp.sum(array, axis=1, keepdims=True)


def _total(array):
    return jnp.sum(jnp.sum(array, axis=1, keepdims=True), axis=0, keepdims=True)


def _dot(a, b, axis_a, axis_b):
    # One bfloat16 pass is not enough: read-outs are ranked.
    contract = (((axis_a,), (axis_b,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)
