"""Which forms of its operations the decoder takes on a Hopper GPU: programs are traced as for one, and not run."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from kvpop_jax.models import ModelConfig, apply_layer, init_params, rope_rotation
from pallas_kernels import backend

CONFIG = ModelConfig(
    family="qwen3", vocab_size=8, hidden_size=256, intermediate_size=512, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=128, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tie_embeddings=True, qk_norm=True,
    max_position=1024, bos_token_id=None, eos_token_ids=(), pad_token_id=0,
)  # fmt: skip

pytestmark = [
    pytest.mark.gpu_interpret,
    pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Pallas Mosaic GPU kernels need JAX 0.11.2 or newer"),
]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(backend, "platform", lambda: "gpu")


def layer(residual_BTE, tokens_at_once=None, config=CONFIG):
    """One layer whose attention hands on its queries."""
    params = init_params(config, jax.random.key(0), jnp.dtype("bfloat16")).layers[0]
    position_BT = jnp.zeros(residual_BTE.shape[:2], jnp.int32)
    rotation = rope_rotation(config, position_BT, residual_BTE.dtype)

    def queries(inputs):
        return inputs.q_BTHD, None

    return apply_layer(config, queries, params, residual_BTE, rotation, tokens_at_once=tokens_at_once)[0]


def kernels(function, tokens):
    residual_BTE = jax.ShapeDtypeStruct((*tokens, CONFIG.hidden_size), jnp.bfloat16)
    return str(jax.make_jaxpr(function)(residual_BTE)).count("mpmd_map[")


@pytest.mark.parametrize("norms", [True, False])
def test_a_step_of_few_rows_takes_a_kernel_for_each_product_and_one_for_the_heads(norms):
    assert kernels(partial(layer, config=replace(CONFIG, qk_norm=norms)), (4, 1)) == 5


def test_many_rows_are_left_to_xla():
    assert kernels(layer, (32, 1)) == 0


@pytest.mark.parametrize("length", [64, 90])
def test_a_prompt_in_turns_is_no_row_of_decode_steps(length):
    assert kernels(partial(layer, tokens_at_once=16), (1, length)) == 0


def test_few_tokens_can_be_differentiated():
    def loss(residual_BTE):
        return jnp.sum(layer(residual_BTE).astype(jnp.float32))

    residual_BTE = jax.random.normal(jax.random.key(1), (1, 2, CONFIG.hidden_size), jnp.bfloat16)
    gradient_BTE = jax.grad(loss)(residual_BTE)
    assert gradient_BTE.dtype == jnp.bfloat16
    assert float(jnp.max(jnp.abs(gradient_BTE))) > 0
