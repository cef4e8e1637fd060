"""Plain JAX `split_qkv`."""

from pallas_kernels.norms import rms_norm
from pallas_kernels.rotary import apply_rope


def split_qkv(qkv, rotation, q_norm_D, k_norm_D, eps):
    """See `api.split_qkv`."""
    *tokens, _, _, D = qkv.shape
    q, k, v = qkv[..., :-2, :].reshape(*tokens, -1, D), qkv[..., -2, :], qkv[..., -1, :]
    if q_norm_D is not None:
        q = rms_norm(q, q_norm_D, eps)
    if k_norm_D is not None:
        k = rms_norm(k, k_norm_D, eps)
    return apply_rope(q, rotation), apply_rope(k, rotation), v
