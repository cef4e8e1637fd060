"""cuDNN's dense form of `masked_attention`: what it takes, and on a GPU against the dense form."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masked_attention_suite import Case, random_inputs, run, run_dense
from oracles import assert_close

from pallas_kernels.backend import BackendError
from pallas_kernels.masked_attention import NEVER, masked_attention


def arguments(dtype="bfloat16", head_dim: int = 64, expiry=None, segment=None, tokens: int = 8):
    q_BTHD, kv_BSKD = (jax.ShapeDtypeStruct((1, tokens, heads, head_dim), dtype) for heads in (2, 1))
    return q_BTHD, kv_BSKD, kv_BSKD, expiry, segment


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (dict(expiry=jax.ShapeDtypeStruct((1, 1, 8), "int32")), "expiry_BKS=None only"),
        (dict(segment=jax.ShapeDtypeStruct((1, 8), "int32")), "segment_BS=None only"),
        (dict(dtype=jnp.float32), "not float32"),
        (dict(tokens=9), "even numbers of tokens"),
        (dict(head_dim=256), "up to 128, not 256"),
        ({}, "NVIDIA GPUs from Ampere on"),
    ],
    ids=["expiry", "documents", "float32", "odd_length", "wide_heads", "no_gpu"],
)
def test_what_cudnn_cannot_do_is_refused(given, reason):
    with pytest.raises(BackendError, match=f"backend='cudnn' .*{reason}"):
        masked_attention(*arguments(**given), backend="cudnn")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestOnAGPU:
    @pytest.mark.parametrize("case", [Case(((200,), (200,)), 200, group=4, head_dim=128), Case(((130,),), 130, 2)])
    def test_output_and_gradients_match_the_dense_form_through_both_outputs(self, case):
        x = random_inputs(case, "bfloat16")
        never = replace(x, expiry_BKS=np.full_like(x.expiry_BKS, NEVER))
        do_BTHD, dlse_BHT = x.cotangents
        for cotangents in ((do_BTHD, np.zeros_like(dlse_BHT)), (np.zeros_like(do_BTHD), dlse_BHT)):
            wanted = run_dense(replace(never, cotangents=cotangents))
            got = run("cudnn", replace(x, expiry_BKS=None, segment_BS=None, cotangents=cotangents))
            for array, wanted_array in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                assert_close(array, wanted_array, 2**-6)

    def test_auto_takes_it_for_dense_attention_only(self):
        x = random_inputs(Case(((128,),), 128), "bfloat16")

        def lowered(expiry_BKS):
            def output(*qkv):
                return masked_attention(*qkv, expiry_BKS, None)[0]

            return jax.jit(output).lower(*x.inputs).as_text()

        assert "cudnn" in lowered(None) and "mosaic_gpu" not in lowered(None), "the unread log-sum-exp is left out"
        assert "cudnn" not in lowered(x.expiry_BKS)
