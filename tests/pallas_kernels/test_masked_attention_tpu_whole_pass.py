"""The real TPU compiler takes a whole sparse pass and its gradient; its own file, so that it runs beside others."""

import jax
import jax.numpy as jnp
import pytest
from tpu_compilation import compile_for

from pallas_kernels import masked_attention

pytestmark = [pytest.mark.tpu_compile, pytest.mark.usefixtures("libtpu")]


def test_a_whole_sparse_pass_and_its_gradient_hold_nothing_of_the_size_of_the_map():
    S, H, K, D = 131072, 32, 8, 128

    def loss(q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS):
        o_BTHD, lse_BHT = masked_attention(q_BTHD, k_BSKD, v_BSKD, expiry_BKS, segment_BS, capacity=4096)
        return o_BTHD.astype(jnp.float32).sum() + lse_BHT.sum()

    qkv = [_shape(1, S, heads, D, dtype="bfloat16") for heads in (H, K, K)]
    compiled = compile_for(
        "v5p", jax.value_and_grad(loss, (0, 1, 2)), *qkv, _shape(1, K, S, dtype="int32"),
        _shape(1, S, dtype="int32"),
    )  # fmt: skip
    kernels = {f"masked_attention_{name}" for name in ("forward", "dq", "dkv")}
    assert {name.strip("_") for name in compiled.vmem} == kernels
    assert compiled.largest_array <= S * H * D, "nothing is larger than q"
    print(f"\n{S} tokens: {compiled.temporary / 2**30:.2f} GiB of temporaries, q is {S * H * D / 2**29:.2f} GiB")


def _shape(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)
