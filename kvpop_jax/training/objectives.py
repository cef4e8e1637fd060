"""Pretraining's objective, and the dense forward pass that distillation shares with it."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvpop_jax.models import DecoderParams, LayerInputs, ModelConfig, unembed
from kvpop_jax.sharding import gathered
from kvpop_jax.training import losses
from kvpop_jax.training.data import Batch
from kvpop_jax.training.scan import scan_layers
from kvpop_jax.training.step import Groups, Metrics, Objective
from pallas_kernels.masked_attention import masked_attention


def pretrain(config: ModelConfig, dtype: jnp.dtype, *, remat: bool) -> Objective:
    """Cross entropy of the dense model; trains "base"."""

    def objective(
        weights: Groups, frozen: Any, batch: Batch, pool_B: Int[Array, "B"], key: Array
    ) -> tuple[Float[Array, ""], Metrics]:
        del frozen, pool_B, key
        params = cast(weights["base"], dtype)
        hidden_BSE = dense_hidden(config, params, batch, remat=remat)
        predicts_BS = losses.predicts(batch.segment_BS, batch.loss_BS)
        loss, accuracy = losses.cross_entropy(
            hidden_BSE, whole_unembed(config, params), batch.token_BS, predicts_BS, config.vocab_size
        )
        return loss, {"cross_entropy": loss, "accuracy": accuracy, "terms/base": losses.terms(predicts_BS)}

    return objective


def dense_hidden(
    config: ModelConfig, params: DecoderParams, batch: Batch, *, remat: bool = False
) -> Float[Array, "B S E"]:
    """Final hidden states of the model with full attention inside every document."""

    def attend(_layer: Any, _of_layer: Any, inputs: LayerInputs) -> tuple[Float[Array, "B T H D"], None]:
        return masked_attention(inputs.q_BTHD, inputs.k_BTKD, inputs.v_BTKD, None, batch.segment_BS)[0], None

    return scan_layers(config, params, batch.token_BS, batch.position_BS, attend, remat=remat)[0]


def whole_unembed(config: ModelConfig, params: DecoderParams) -> losses.Unembed:
    """The model's unembedding, gathered once for all stretches of tokens that a loss takes in turns."""
    head_EV = None if params.head_EV is None else gathered(params.head_EV)
    return partial(unembed, config, replace(params, head_EV=head_EV, embedding_VE=gathered(params.embedding_VE)))


def cast(tree: Any, dtype: jnp.dtype) -> Any:
    """Floating leaves in `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)
