"""What the queries of a prompt pay attention to, before anything of it is evicted."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvpop_jax.policies.machinery.base import Prompt
from kvpop_jax.policies.machinery.keeping import prompt_length
from pallas_kernels import masked_attention, received_log_mass

Reduce = Callable[[Float[Array, "H W S"], Float[Array, "W 1"]], Float[Array, "H S"]]
"""(attention of the last queries, which of them exist) -> one number per head and token."""


def full_attention(prompt: Prompt) -> Float[Array, "B S H D"]:
    """Attention of a prompt from which nothing is evicted before its end."""
    return _dense(prompt)[0]


def accumulated_attention(prompt: Prompt, decay: float = 1.0) -> Float[Array, "B K S"]:
    """Attention that each token received from all queries of the prompt, averaged over the heads of a group.

    Args:
        decay: multiplies what a token has received so far at every query; 0 < decay <= 1.
    """
    _o, lse_BHS = _dense(prompt)
    # The weight decay ** (last query - query), as a part of that query's normaliser.
    age_BS = prompt_length(prompt)[:, None] - 1 - prompt.layout.position_BS
    lse_BHS = lse_BHS - jnp.log(decay) * age_BS[:, None]
    mass_BHS = received_log_mass(prompt.q_BSHD, prompt.k_BSKD, lse_BHS, prompt.layout.segment_BS, delay=0)
    return group_mean(jnp.exp(mass_BHS), prompt.k_BSKD.shape[2])


def window_attention(prompt: Prompt, window: int, reduce: Reduce) -> Float[Array, "B H S"]:
    """What `reduce` makes of the attention of each prompt's last `window` queries over the whole prompt.

    Rows are taken one after another, so that no more than one row's attention exists at once.
    """
    S, K = prompt.k_BSKD.shape[1:3]

    def one_row(row):
        q_SHD, k_SKD, real_S, length = row
        query_W = length - window + jnp.arange(window)
        q_WHD = q_SHD[jnp.maximum(query_W, 0)]
        H, D = q_WHD.shape[1:]
        q_WKGD = q_WHD.reshape(window, K, H // K, D)
        s_KGWS = jnp.einsum(
            "WKGD,SKD->KGWS", q_WKGD, k_SKD, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
        )
        seen_WS = (jnp.arange(S) <= query_W[:, None]) & real_S
        s_HWS = jnp.where(seen_WS, s_KGWS.reshape(H, window, S) * D**-0.5, -jnp.inf)
        exists_W1 = (query_W >= 0)[:, None]
        a_HWS = jax.nn.softmax(jnp.where(exists_W1, s_HWS, 0), axis=-1) * exists_W1
        return reduce(a_HWS, exists_W1.astype(jnp.float32))

    real_BS = prompt.layout.segment_BS > 0
    return lax.map(one_row, (prompt.q_BSHD, prompt.k_BSKD, real_BS, prompt_length(prompt)))


def mean_over_queries(a_HWS: Float[Array, "H W S"], exists_W1: Float[Array, "W 1"]) -> Float[Array, "H S"]:
    """For `window_attention`: the mean over those queries that exist."""
    return jnp.sum(a_HWS, axis=1) / jnp.sum(exists_W1)


def pooled(score_BHS: Float[Array, "B H S"], prompt: Prompt, window: int, kernel: int) -> Float[Array, "B K S"]:
    """SnapKV's smoothing: the last `window` columns dropped, an average over neighbours with zeros beyond both ends,
    then the mean over the heads of a group."""
    before_BS = prompt.layout.position_BS < prompt_length(prompt)[:, None] - window
    score_BHS = jnp.where((before_BS & (prompt.layout.segment_BS > 0))[:, None], score_BHS, 0)
    S, side = score_BHS.shape[-1], kernel // 2
    padded = jnp.pad(score_BHS, ((0, 0), (0, 0), (side, side)))
    smooth_BHS = jnp.mean(jnp.stack([padded[..., shift : shift + S] for shift in range(kernel)]), axis=0)
    return group_mean(smooth_BHS, prompt.k_BSKD.shape[2])


def group_mean(x_BHS: Float[Array, "B H S"], num_kv_heads: int) -> Float[Array, "B K S"]:
    """Mean over the query heads that share a KV head."""
    B, H, S = x_BHS.shape
    return jnp.mean(x_BHS.reshape(B, num_kv_heads, H // num_kv_heads, S), axis=2)


def _dense(prompt):
    return masked_attention(prompt.q_BSHD, prompt.k_BSKD, prompt.v_BSKD, None, prompt.layout.segment_BS)
