import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpop_jax.models import ModelConfig, RopeScaling, rope_frequencies, rope_rotation
from pallas_kernels.rotary import apply_rope

CONFIG = ModelConfig(
    family="llama",
    vocab_size=8,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    tie_embeddings=True,
    qk_norm=False,
    max_position=1024,
    bos_token_id=None,
    eos_token_ids=(),
    pad_token_id=None,
)


@pytest.mark.core
def test_scores_depend_on_the_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    score = [
        jnp.vdot(*(apply_rope(x, rope_rotation(CONFIG, jnp.array([[p]]), x.dtype)) for x, p in ((q, a), (k, b))))
        for a, b in ((9, 2), (107, 100), (7, 0))
    ]
    np.testing.assert_allclose(score, score[0], rtol=1e-4)


def test_pairs_are_half_split():
    x_BTHD = jnp.zeros((1, 1, 1, 8)).at[..., 0].set(1.0)
    rotated = apply_rope(x_BTHD, rope_rotation(CONFIG, jnp.array([[1]]), x_BTHD.dtype))
    np.testing.assert_allclose(rotated[0, 0, 0, [0, 4]], [math.cos(1), math.sin(1)], rtol=1e-6)


def test_bfloat16_positions_do_not_collapse():
    x_BTHD = jnp.ones((1, 2, 1, 8), jnp.bfloat16)
    rotated = apply_rope(x_BTHD, rope_rotation(CONFIG, jnp.array([[4096, 4097]]), x_BTHD.dtype))
    assert rotated.dtype == jnp.bfloat16
    assert not np.array_equal(rotated[0, 0], rotated[0, 1])


def test_llama31_scaling_keeps_short_wavelengths_and_stretches_long_ones():
    scaled = dataclasses.replace(CONFIG, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64))
    ratio = rope_frequencies(CONFIG) / rope_frequencies(scaled)
    # Wavelengths are 2 pi 10^i: 6.3 < 64 / 4, 63 in between, 628 and 6283 > 64.
    assert ratio[0] == 1.0 and 1.0 < ratio[1] < 8.0
    np.testing.assert_allclose(ratio[2:], 8.0)
