"""A random two-layer Qwen3 whose attention is sharp enough for evictions to matter, and every policy set up on it."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvpop_jax import policies
from kvpop_jax.models import LoadedModel, ModelConfig, init_params
from kvpop_jax.models.rope import rope_frequencies
from kvpop_jax.policies import Policy, PolicySettings
from kvpop_jax.scorers import MLPSettings, MLSTMSettings, dims_of, mlp_scorer, mlstm_scorer

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tie_embeddings=False,
    qk_norm=True,
    max_position=256,
    bos_token_id=None,
    eos_token_ids=(),
    pad_token_id=0,
)
SINKS, WINDOW = 2, 5
SCORERS = {
    "kvpop": mlstm_scorer(MLSTMSettings(skip_width=4), dims_of(CONFIG)),
    "kvpop_immediate": mlstm_scorer(MLSTMSettings(read="immediate"), dims_of(CONFIG)),
    "kvpop_mlp": mlp_scorer(MLPSettings(width=8), dims_of(CONFIG)),
}
FREQUENCY_D2 = rope_frequencies(CONFIG).astype(np.float32)
ENTRY_BYTES = 2 * CONFIG.head_dim * 4


@cache
def tiny_model() -> LoadedModel:
    """Matrices are large, and QK-norms random: with the initial ones all keys of a head have one norm."""
    key, *norm_keys = jax.random.split(jax.random.key(0), 1 + CONFIG.num_layers)
    params = init_params(CONFIG, key, jnp.float32)
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim >= 2 else leaf, params)
    layers = []
    for layer, norm_key in zip(params.layers, norm_keys, strict=True):
        norm_2D = 1 + 0.5 * jax.random.normal(norm_key, (2, CONFIG.head_dim))
        layers.append(replace(layer, q_norm_D=norm_2D[0], k_norm_D=norm_2D[1]))
    return LoadedModel(CONFIG, replace(params, layers=layers), tokenizer=None, source="tiny", fingerprint="tiny")


@cache
def make_policy(name: str) -> Policy:
    """The policy of that name; "kvpop_immediate" is kvpop with the scorer that reads at arrival."""
    settings = PolicySettings(sinks=SINKS, window=WINDOW, scorer=SCORERS.get(name))
    return policies.make(name.removesuffix("_immediate"), settings)


def initial_scorer(name: str, layer: int) -> Any:
    """What training starts from: the head is zero. None for policies without a scorer."""
    return SCORERS[name].init(jax.random.key(layer)) if name in SCORERS else None


def random_scorer(name: str, layer: int) -> Any:
    """Shaken so that no head, gate or bias is zero."""
    rng = np.random.default_rng(layer)

    def shaken(leaf):
        return leaf + jnp.asarray(0.4 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(shaken, initial_scorer(name, layer))


def distinct_tokens(rows: int, length: int) -> np.ndarray:
    """Rows without repetition: in the first layer a repeated token has the same key norm again, up to rounding."""
    rng = np.random.default_rng(0)
    return np.stack([rng.permutation(CONFIG.vocab_size)[:length] for _ in range(rows)]).astype(np.int32)
