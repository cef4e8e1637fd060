"""Real TPU compilers take the kernel of `received_log_mass` at production sizes; `-s` prints what it allocates."""

import jax
import pytest
from tpu_compilation import TOPOLOGIES, compile_for

from pallas_kernels import received_log_mass
from pallas_kernels.tpu_tiles import vmem_limit

pytestmark = [pytest.mark.tpu_compile, pytest.mark.usefixtures("libtpu")]

H, K = 32, 8


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_received_log_mass_fits_in_vmem(chip):
    _compile(chip, 131072 if chip == "v5p" else 16384, 128, sampled=False)


def test_received_log_mass_of_sampled_queries_holds_nothing_of_the_size_of_the_map():
    _compile("v5p", 16384, 128, sampled=True)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_received_log_mass_fits_in_vmem_at_other_sizes_of_heads(head_dim):
    _compile("v5e", 16384, head_dim, sampled=False)


def test_received_log_mass_in_float32_is_given_the_vmem_it_asks_for():
    """The largest group of the widest heads, which compilers refuse unasked."""
    _compile("v5e", 2048, 256, sampled=False, kv_heads=2, dtype="float32")


def _compile(chip, S, head_dim, *, sampled, kv_heads=K, dtype="bfloat16"):
    def mass(q_BTHD, k_BSKD, lse_BHT, segment_BS, query_BT):
        return received_log_mass(q_BTHD, k_BSKD, lse_BHT, segment_BS, delay=256, query_BT=query_BT if sampled else None)

    q_shape, k_shape = (_shape(1, S, heads, head_dim, dtype=dtype) for heads in (H, kv_heads))
    compiled = compile_for(
        chip, mass, q_shape, k_shape, _shape(1, H, S, dtype="float32"), _shape(1, S, dtype="int32"),
        _shape(1, S, dtype="bool"),
    )  # fmt: skip
    assert set(compiled.vmem) == {"received_log_mass"}
    assert compiled.largest_array <= S * H * head_dim, "nothing is larger than q"
    what = f"{chip}, {S} tokens, heads of {head_dim}{', a subset of the queries' if sampled else ''}, {dtype}"
    compiled.assert_vmem(what, vmem_limit(dtype))


def _shape(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)
