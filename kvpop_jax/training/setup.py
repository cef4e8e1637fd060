"""From a configuration to everything a run needs: model, groups of weights, objective, optimizers, data, export."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvpop_jax import sharding
from kvpop_jax.config import InitConfig, TrainConfig
from kvpop_jax.models import (
    ModelConfig,
    default_dtype,
    init_params,
    load_model,
    load_tokenizer,
    save_model,
)
from kvpop_jax.training import objectives
from kvpop_jax.training.data import make_iterator
from kvpop_jax.training.documents import Encoder
from kvpop_jax.training.optimizer import make_optimizer, schedule
from kvpop_jax.training.sources import Source, open_source
from kvpop_jax.training.step import GroupOptimizer, Groups, Measure, Objective


@dataclass(frozen=True)
class Setup:
    """What a run is made of.

    Attributes:
        weights: the trained weights by group, in float32, on the mesh as `frozen`.
        frozen: weights that the objective reads and does not train.
        objective: what is minimised.
        measure: more metrics, computed when a line is printed; None if the objective gives all there are.
        optimizers: one per group.
        pools: pool sizes that rows take turns through.
        data: the batches.
        export: writes trained weights, in host memory, into an empty folder, for `load_model` and `load_scorer`.
    """

    weights: Groups
    frozen: Any
    objective: Objective
    measure: Measure | None
    optimizers: dict[str, GroupOptimizer]
    pools: tuple[int, ...]
    data: grain.DatasetIterator
    export: Callable[[Path, Groups], None]


def compute_dtype(config: TrainConfig) -> jnp.dtype:
    """Type of weights and activations inside a step."""
    return default_dtype() if config.dtype == "auto" else jnp.dtype(config.dtype)


def prepare_pretrain(config: TrainConfig, mesh: Mesh) -> Setup:
    """A model from scratch, or one to go on with, trained on cross entropy.

    Raises:
        UserError: a model, tokenizer or data file that cannot be used, or a size that the mesh does not divide.
    """
    source = open_source(config.data, config.seed)  # a bad file is found before a model is loaded
    dtype = compute_dtype(config)
    if config.model.source is None:
        model_config, params, tokenizer = _new_model(config, mesh)
    else:
        model = load_model(config.model.source, jnp.float32, mesh)
        model_config, params, tokenizer = model.config, model.params, model.tokenizer
    return Setup(
        weights={"base": params},
        frozen=(),
        objective=objectives.pretrain(model_config, dtype, remat=config.remat),
        measure=None,
        optimizers=make_optimizers(config, ("base",)),
        pools=(0,),
        data=open_data(config, source, tokenizer, longest_prompt=None),
        export=partial(export_model, config, model_config, tokenizer),
    )


def export_model(config: TrainConfig, model_config: ModelConfig, tokenizer: Any, folder: Path, weights: Groups) -> None:
    """Writes the trained model as a Hugging Face folder."""
    save_model(folder, model_config, weights["base"], tokenizer, jnp.dtype(config.export_dtype))


def make_optimizers(config: TrainConfig, groups: tuple[str, ...]) -> dict[str, GroupOptimizer]:
    """One optimizer for each of the groups that are trained."""
    rates = {"base": config.optimizer.base, "scorer": config.optimizer.scorer}
    return {
        group: GroupOptimizer(
            make_optimizer(config.optimizer, rates[group], config.steps), schedule(rates[group], config.steps)
        )
        for group in groups
    }


def open_data(
    config: TrainConfig, source: Source, tokenizer: Any, *, longest_prompt: int | None
) -> grain.DatasetIterator:
    """The batches of a source's documents; a prompt longer than `longest_prompt` is refused."""
    encoder = Encoder(
        tokenizer=tokenizer,
        seq_len=config.seq_len,
        overlong=config.data.overlong,
        loss_tokens=config.data.loss_tokens,
        longest_prompt=longest_prompt,
        own_row=config.data.packing == "none",
    )
    return make_iterator(
        source,
        encoder,
        config.data,
        batch_size=config.batch_size,
        seed=config.seed,
    )


def _new_model(config: TrainConfig, mesh: Mesh) -> tuple[ModelConfig, Any, Any]:
    tokenizer = load_tokenizer(Path(config.model.tokenizer or ""))
    model_config = _new_model_config(config.model.init, tokenizer)
    sharding.check(model_config, mesh)
    params = init_params(model_config, jax.random.key(config.seed), jnp.dtype(jnp.float32))
    return model_config, sharding.place(params, mesh), tokenizer


def _new_model_config(init: InitConfig, tokenizer: Any) -> ModelConfig:
    end = tokenizer.eos_token_id
    return ModelConfig(
        family=init.family,
        vocab_size=len(tokenizer),
        hidden_size=init.hidden_size,
        intermediate_size=init.intermediate_size,
        num_layers=init.num_layers,
        num_heads=init.num_heads,
        num_kv_heads=init.num_kv_heads,
        head_dim=init.head_dim,
        rms_norm_eps=init.rms_norm_eps,
        rope_theta=init.rope_theta,
        rope_scaling=None,
        tie_embeddings=init.tie_embeddings,
        qk_norm=init.family == "qwen3",
        max_position=init.max_position,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=() if end is None else (end,),
        pad_token_id=tokenizer.pad_token_id,
    )
