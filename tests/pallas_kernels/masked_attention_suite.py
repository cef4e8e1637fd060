"""The suites every back end of `masked_attention` runs: subclass, name the back end, say what it computes in.

A back end that refuses the bias leaves `MaskedAttentionBiasSuite` out. The judge is a dense softmax of one head at a
time, in float64, and its gradient by automatic differentiation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import assert_close, largest_intermediate, segment_rows, visibility

from pallas_kernels.backend import BackendError
from pallas_kernels.masked_attention import NEVER, masked_attention


@dataclass(frozen=True)
class Case:
    """Sizes of one random problem; `lengths` are the documents of each row, negative for padding."""

    lengths: tuple[tuple[int, ...], ...]
    length: int
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 64


CASES = {
    "one_token": Case(((1,),), 1),
    "seven_tokens_group_3": Case(((7,), (3, 4)), 7, kv_heads=2, group=3),
    "one_block_group_4": Case(((128,),), 128, group=4),
    "one_past_a_block": Case(((129,), (60, -9, 60)), 129, kv_heads=2),
    "two_ragged_blocks_group_8_dim_128": Case(((200,), (-3, 90, 100, -7)), 200, group=8, head_dim=128),
}
# A delay within the row, one that reaches every query, and one that reaches none.
BIAS_CASES = {0: "seven_tokens_group_3", 9: "seven_tokens_group_3", 40: "two_ragged_blocks_group_8_dim_128"}


class MaskedAttentionSuite:
    """Subclass it and name the back end."""

    backend: str
    dtype: str = "float64"
    """The widest dtype the back end computes in."""
    tolerance: float = 1e-12
    """Largest error in that dtype, as a share of the largest entry of the array compared."""

    @pytest.mark.core
    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_output_and_gradients_match_the_dense_form(self, case, float64):
        x = random_inputs(case, self.dtype)
        assert run(self.backend, x)[0][1].dtype == jnp.promote_types(self.dtype, jnp.float32)
        assert_matches_the_dense_form(self.backend, x, self.tolerance)

    @pytest.mark.core
    def test_a_query_that_sees_nothing_gets_zero_and_no_gradient(self, float64):
        x = random_inputs(CASES["one_past_a_block"], self.dtype)
        # Row 0: every key expires before it is seen. Row 1: padding sees nothing.
        x.expiry_BKS[0] = 0
        blind_BT = (x.segment_BS == 0) | np.array([[True], [False]])
        (o_BTHD, lse_BHT), gradients = run(self.backend, x)
        assert not np.any(o_BTHD[blind_BT])
        assert np.all(np.isneginf(np.swapaxes(lse_BHT, 1, 2)[blind_BT]))
        for gradient in gradients:
            assert np.all(np.isfinite(gradient)) and not np.any(gradient[blind_BT])

    def test_a_key_is_last_seen_by_the_query_before_its_expiry(self, float64):
        x = random_inputs(CASES["seven_tokens_group_3"], self.dtype)
        x.expiry_BKS[:] = NEVER
        x.expiry_BKS[0, 1, 2] = 5
        q_BTHD, k_BSKD, v_BSKD = x.inputs
        moved_BSKD = v_BSKD.copy()
        moved_BSKD[0, 2] += 1
        before, after = (run(self.backend, replace(x, inputs=(q_BTHD, k_BSKD, v)))[0][0] for v in (v_BSKD, moved_BSKD))
        changed_TH = np.any(before != after, axis=-1)[0]
        assert changed_TH[:, 0].tolist() == [False, False, True, True, True, True, True]
        assert changed_TH[:, 3].tolist() == [False, False, True, True, True, False, False]

    @pytest.mark.core
    def test_bfloat16_stays_within_its_rounding(self):
        """Output: two roundings of 2^-9, of p and of o, each of at most the largest value. Gradients: o, p or ds, and
        the result are rounded; sums that cancel may leave less than half of what was rounded, hence 2^-6."""
        x = random_inputs(CASES["two_ragged_blocks_group_8_dim_128"], "bfloat16")
        (o_BTHD, lse_BHT), gradients = run(self.backend, x)
        (dense_o_BTHD, dense_lse_BHT), dense_gradients = run_dense(x)
        assert o_BTHD.dtype == jnp.bfloat16 and lse_BHT.dtype == jnp.float32
        assert np.max(np.abs(o_BTHD.astype(np.float64) - dense_o_BTHD)) <= 2**-8 * np.max(np.abs(x.inputs[2]))
        assert_close(lse_BHT, dense_lse_BHT, 2**-18)
        for gradient, dense_gradient in zip(gradients, dense_gradients, strict=True):
            assert gradient.dtype == jnp.bfloat16
            assert_close(gradient, dense_gradient, 2**-6)

    @pytest.mark.core
    def test_nothing_of_the_size_of_the_attention_map_is_made(self):
        S, H, K, D = 2048, 2, 1, 64

        def loss(q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS):
            o_BTHD, lse_BHT = masked_attention(q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS, backend=self.backend)
            return o_BTHD.sum() + lse_BHT.sum()

        shapes = [((1, S, H, D), "float32"), *[((1, S, K, D), "float32")] * 2, ((1, K, S), "int32"), ((1, S), "int32")]
        arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        assert largest_intermediate(jax.value_and_grad(loss, argnums=(0, 1, 2)), *arguments) < S * S

    def test_an_unknown_back_end_is_refused(self):
        x = random_inputs(CASES["one_token"], "float32")
        with pytest.raises(BackendError, match="nonesuch"):
            masked_attention(*x.inputs, x.expiry_BKS, x.segment_BS, backend="nonesuch")


class MaskedAttentionBiasSuite:
    """For back ends that add a bias: the same comparison with the bias among the inputs."""

    backend: str
    dtype: str = "float64"
    tolerance: float = 1e-12

    @pytest.mark.parametrize("delay", BIAS_CASES)
    def test_bias_reaches_the_queries_past_its_delay_with_its_gradient(self, delay, float64):
        x = random_inputs(CASES[BIAS_CASES[delay]], self.dtype, bias_delay=delay)
        assert_matches_the_dense_form(self.backend, x, self.tolerance)

    def test_a_hard_bias_evicts_like_an_expiry(self, float64):
        case, delay = CASES["two_ragged_blocks_group_8_dim_128"], 40
        x = random_inputs(case, self.dtype, bias_delay=delay)
        x.expiry_BKS[:] = NEVER
        *qkv, bias_BKS = x.inputs
        drop_BKS = bias_BKS > 0
        by_bias = replace(x, inputs=(*qkv, np.where(drop_BKS, -1e30, 0).astype(bias_BKS.dtype)))
        expiry_BKS = np.where(drop_BKS, np.arange(case.length) + delay, NEVER).astype(np.int32)
        by_expiry = replace(x, inputs=tuple(qkv), bias_delay=None, expiry_BKS=expiry_BKS)
        (o_BTHD, lse_BHT), gradients = run(self.backend, by_bias)
        (wanted_o_BTHD, wanted_lse_BHT), wanted_gradients = run(self.backend, by_expiry)
        assert_close(o_BTHD, wanted_o_BTHD, self.tolerance)
        assert_close(lse_BHT, wanted_lse_BHT, self.tolerance)
        for gradient, wanted in zip(gradients[:3], wanted_gradients, strict=True):
            assert_close(gradient, wanted, self.tolerance)


@dataclass(frozen=True)
class Inputs:
    """One problem: q, k, v, then the bias where `bias_delay` says that there is one; cotangents of o and lse."""

    inputs: tuple[np.ndarray, ...]
    expiry_BKS: np.ndarray
    segment_BS: np.ndarray
    bias_delay: int | None
    cotangents: tuple[np.ndarray, np.ndarray]


def random_inputs(case: Case, dtype: str, bias_delay: int | None = None) -> Inputs:
    """Some keys never expire, most do after a while, a few before they are seen."""
    segment_BS = segment_rows([list(row) for row in case.lengths], case.length)
    (B, S), K, H, D = segment_BS.shape, case.kv_heads, case.kv_heads * case.group, case.head_dim
    rng = np.random.default_rng(S * 1000 + H * 10 + D)

    def normal(*shape, dtype=dtype):
        return rng.normal(size=shape).astype(jnp.dtype(dtype))

    inputs = (normal(B, S, H, D), normal(B, S, K, D) * 2, normal(B, S, K, D))
    if bias_delay is not None:
        inputs += (normal(B, K, S),)
    life_BKS = rng.geometric(4 / (S + 4), size=(B, K, S)) - 1
    expiry_BKS = np.where(rng.random((B, K, S)) < 0.2, NEVER, np.arange(S) + life_BKS).astype(np.int32)
    cotangents = (normal(B, S, H, D), normal(B, H, S, dtype=jnp.promote_types(dtype, jnp.float32)))
    return Inputs(inputs, expiry_BKS, segment_BS, bias_delay, cotangents)


def assert_matches_the_dense_form(backend: str, x: Inputs, tolerance: float) -> None:
    """Output, log-sum-exp, and the gradients of all inputs: through the output alone, and through the lse alone."""
    do_BTHD, dlse_BHT = x.cotangents
    for cotangents in ((do_BTHD, np.zeros_like(dlse_BHT)), (np.zeros_like(do_BTHD), dlse_BHT)):
        assert_run_matches_the_dense_form(backend, replace(x, cotangents=cotangents), tolerance)


def assert_run_matches_the_dense_form(backend: str, x: Inputs, tolerance: float) -> None:
    """The same with the cotangents as they are, in one run."""
    (o_BTHD, lse_BHT), gradients = run(backend, x)
    (dense_o_BTHD, dense_lse_BHT), dense_gradients = run_dense(x)
    assert_close(o_BTHD, dense_o_BTHD, tolerance)
    assert_close(lse_BHT, dense_lse_BHT, tolerance)
    for gradient, dense_gradient in zip(gradients, dense_gradients, strict=True):
        assert_close(gradient, dense_gradient, tolerance)


def run(backend: str, x: Inputs):
    """((o, lse), gradients of the inputs) of the back end, as NumPy arrays."""
    result = _compiled(backend, x.bias_delay)(x.inputs, x.expiry_BKS, x.segment_BS, x.cotangents)
    return jax.tree.map(np.asarray, result)


@cache
def _compiled(backend: str, bias_delay: int | None) -> Callable:
    @jax.jit
    def run(inputs, expiry_BKS, segment_BS, cotangents):
        def attend(q_BTHD, k_BSKD, v_BSKD, bias_BKS=None):
            return masked_attention(
                q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS,
                bias_BKS=bias_BKS, bias_delay=bias_delay or 0, backend=backend,
            )  # fmt: skip

        outputs, pull = jax.vjp(attend, *inputs)
        return outputs, pull(cotangents)

    return run


def run_dense(x: Inputs):
    """The same from the dense form in float64, one head at a time; of padded size, so that all cases compile once."""
    q_BTHD, k_BSKD, v_BSKD, bias_BKS, do_BTHD, dlse_BHT = (
        np.asarray(a, np.float64)
        for a in (*x.inputs[:3], x.inputs[3] if len(x.inputs) > 3 else np.zeros(x.expiry_BKS.shape), *x.cotangents)
    )
    B, T, H, D = q_BTHD.shape
    group = H // k_BSKD.shape[2]
    visible_BKTS = visibility(x.expiry_BKS, x.segment_BS)
    late_TS = np.arange(T)[:, None] - np.arange(T) >= (x.bias_delay or 0)
    o_BTHD, lse_BHT = np.zeros(q_BTHD.shape), np.zeros(dlse_BHT.shape)
    gradients = tuple(np.zeros(a.shape) for a in (q_BTHD, k_BSKD, v_BSKD, bias_BKS))
    for b in range(B):
        for h in range(H):
            kv = h // group
            rows = (q_BTHD[b, :, h] / np.sqrt(D), k_BSKD[b, :, kv], v_BSKD[b, :, kv], do_BTHD[b, :, h])
            maps = (late_TS * bias_BKS[b, kv], visible_BKTS[b, kv])
            padded = (_padded(rows, 200, 128), _padded(maps, 200, 200), *_padded([dlse_BHT[b, h]], 200))
            with jax.enable_x64(True):
                o_TD, lse_T, dq_TD, dk_SD, dv_SD, dbias_TS = map(np.asarray, _one_head(*padded))
            o_BTHD[b, :, h], lse_BHT[b, h] = o_TD[:T, :D], lse_T[:T]
            gradients[0][b, :, h] = dq_TD[:T, :D] / np.sqrt(D)
            gradients[1][b, :, kv] += dk_SD[:T, :D]
            gradients[2][b, :, kv] += dv_SD[:T, :D]
            gradients[3][b, kv] += (late_TS * dbias_TS[:T, :T]).sum(0)
    return (o_BTHD, lse_BHT), gradients[: len(x.inputs)]


@jax.jit
def _one_head(rows, maps, dlse_T):
    (q_TD, k_SD, v_SD, do_TD), (bias_TS, visible_TS) = rows, maps

    def attend(q_TD, k_SD, v_SD, bias_TS):
        some_T = visible_TS.any(-1)
        # Rows that see nothing go through a softmax of zeros, whose result is thrown away.
        s_TS = jnp.where(some_T[:, None], jnp.where(visible_TS, q_TD @ k_SD.T + bias_TS, -jnp.inf), 0)
        p_TS = jnp.where(some_T[:, None], jax.nn.softmax(s_TS), 0)
        return p_TS @ v_SD, jnp.where(some_T, jax.nn.logsumexp(s_TS, axis=-1), -jnp.inf)

    outputs, pull = jax.vjp(attend, q_TD, k_SD, v_SD, bias_TS)
    return *outputs, *pull((do_TD, dlse_T))


def _padded(arrays, *shape: int) -> list[np.ndarray]:
    return [np.pad(x, [(0, size - length) for size, length in zip(shape, x.shape, strict=True)]) for x in arrays]
