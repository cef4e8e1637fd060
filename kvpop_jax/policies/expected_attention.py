"""ExpectedAttention (Devoto et al. 2025, arXiv 2510.00636): keep what future queries are expected to attend to.

Queries before rotary embedding are taken as normal, with mean and covariance over the prompt (its sinks left out), and
turned to the mean rotation over the next `future` positions. Score: softmax over keys of mu k / sqrt(D) + k Sigma k /
(2 D), the mean over a group, times the norm of the value. Sinks stay. As in kvpress without its epsilon and without
its decoding mode, which scores again every 512 steps: see `prefill_only` for what happens to the answer.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.keeping import prompt_length
from kvpop_jax.policies.machinery.prefill_only import prefill_only
from kvpop_jax.policies.machinery.prompt_attention import group_mean
from kvpop_jax.policies.machinery.rotation import linear_turn, turn
from kvpop_jax.policies.machinery.settings import PolicySettings


def make(settings: PolicySettings) -> Policy:
    """Keeps `sinks` tokens and the best of the rest."""

    def score(prompt):
        layout = prompt.layout
        scored_BS = (layout.segment_BS > 0) & (layout.position_BS >= settings.sinks)
        attention_BHS = lax.map(
            lambda row: _expected_attention(*row, prompt.frequency_D2, settings.methods.future),
            (prompt.q_BSHD, prompt.k_BSKD, layout.position_BS, scored_BS, prompt_length(prompt)),
        )
        size_BSK = jnp.linalg.norm(prompt.v_BSKD.astype(jnp.float32), axis=-1)
        return group_mean(attention_BHS, prompt.k_BSKD.shape[2]) * jnp.swapaxes(size_BSK, 1, 2)

    return prefill_only("expected_attention", settings, score, sinks=settings.sinks)


def _expected_attention(q_SHD, k_SKD, position_S, scored_S, length, frequency_D2, future):
    """[H, S] of one row."""
    exact = {"preferred_element_type": jnp.float32, "precision": lax.Precision.HIGHEST}
    (S, H, D), K = q_SHD.shape, k_SKD.shape[1]
    count = jnp.maximum(jnp.sum(scored_S), 1)
    angle_S1D2 = position_S[:, None, None] * frequency_D2
    q_SHD = jnp.where(scored_S[:, None, None], turn(q_SHD.astype(jnp.float32), -angle_S1D2), 0)
    mean_HD = jnp.sum(q_SHD, axis=0) / count
    centred_SHD = jnp.where(scored_S[:, None, None], q_SHD - mean_HD, 0)
    cov_HDD = jnp.einsum("SHD,SHF->HDF", centred_SHD, centred_SHD, **exact) / count

    angle_FD2 = (length + jnp.arange(future))[:, None] * frequency_D2
    cos_D2, sin_D2 = jnp.mean(jnp.cos(angle_FD2), axis=0), jnp.mean(jnp.sin(angle_FD2), axis=0)
    mean_HD = linear_turn(mean_HD, cos_D2, sin_D2)
    # The turn of rows, then of columns: R Sigma R^T.
    cov_HDD = linear_turn(jnp.swapaxes(linear_turn(cov_HDD, cos_D2, sin_D2), 1, 2), cos_D2, sin_D2)

    k_SKD = k_SKD.astype(jnp.float32)
    mean_KGD, cov_KGDD = mean_HD.reshape(K, H // K, D), cov_HDD.reshape(K, H // K, D, D)
    z_KGS = jnp.einsum("KGD,SKD->KGS", mean_KGD, k_SKD, **exact) * D**-0.5
    turned_KGSD = jnp.einsum("KGDF,SKF->KGSD", cov_KGDD, k_SKD, **exact)
    z_KGS += jnp.einsum("SKD,KGSD->KGS", k_SKD, turned_KGSD, **exact) / (2 * D)
    z_HS = jnp.where(scored_S, z_KGS.reshape(H, S), -jnp.inf)
    return jnp.where(scored_S, jax.nn.softmax(jnp.where(jnp.any(scored_S), z_HS, 0), axis=-1), 0)
