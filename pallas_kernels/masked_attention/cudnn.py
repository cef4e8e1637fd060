"""Dense `masked_attention` on NVIDIA GPUs, by cuDNN: nothing expires, and every row is one document.

The log-sum-exp is not cuDNN's, which JAX rounds to the dtype of the queries and gives no gradient. It is that of a
second pass, by the kernels of this package or, where they refuse, by plain JAX: exact and differentiable. A compiled
program that does not read it leaves that pass out; one that reads both outputs is served better by those kernels alone.

What cuDNN saves for its gradient has no name, so a layer that is rematerialised attends again. Its causal mask knows no
documents, and its packed layout takes a fixed number of them, so packed rows are left to the kernels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.backend import platform
from pallas_kernels.masked_attention import gpu, reference
from pallas_kernels.masked_attention.dense import as_arrays

MAX_HEAD_DIM = 128


def refuses(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKD: Float[Array, "B S K D"],
    expiry_BKS: object,
    segment_BS: object,
    bias_BKS: object = None,
    bias_delay: int = 0,
    capacity: int | None = None,
) -> str | None:
    """Why cuDNN cannot take these arguments, or None."""
    dtypes = {x.dtype for x in (q_BTHD, k_BSKD, v_BSKD)}
    lengths, D = {q_BTHD.shape[1], k_BSKD.shape[1]}, q_BTHD.shape[3]
    if expiry_BKS is not None:
        return "is dense: takes expiry_BKS=None only"
    if segment_BS is not None:
        return "knows no documents: takes segment_BS=None only"
    if bias_BKS is not None:
        return "adds no bias"
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype("bfloat16"), jnp.dtype("float16")}:
        return f"takes q, k and v all in bfloat16 or all in float16, not {', '.join(sorted(map(str, dtypes)))}"
    if any(length % 2 for length in lengths):
        return "takes even numbers of tokens, for gradients"
    if D % 8 or D > MAX_HEAD_DIM:
        return f"takes head dimensions that are multiples of 8, up to {MAX_HEAD_DIM}, not {D}"
    if platform() != "gpu" or not _from_ampere_on():
        return "is for NVIDIA GPUs from Ampere on (compute capability 8 or more)"
    return None


def _from_ampere_on() -> bool:
    """Whether the GPU here is one of them; a described one, where there is none, is taken to be."""
    if jax.default_backend() != "gpu":
        return True
    major = jax.devices()[0].compute_capability.split(".")[0]
    return major.isdecimal() and int(major) >= 8


def masked_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BSKD: Float[Array, "B S K D"],
    v_BSKD: Float[Array, "B S K D"],
    expiry_BKS: None,
    segment_BS: None,
    bias_BKS: None = None,
    bias_delay: int = 0,
    capacity: int | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B H T"]]:
    """See `api.masked_attention`."""
    o_BTHD = jax.nn.dot_product_attention(q_BTHD, k_BSKD, v_BSKD, is_causal=True, implementation="cudnn")
    arguments = q_BTHD, k_BSKD, v_BSKD, *as_arrays(k_BSKD, expiry_BKS, segment_BS), None, 0
    form = reference if gpu.refuses(*arguments) else gpu
    return o_BTHD, form.masked_attention(*arguments)[1]
