"""A run as small as it gets, for processes that tests start and kill."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from kvpop_jax import cli
from kvpop_jax.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelSource,
    PolicyConfig,
    ScorerConfig,
    TrainConfig,
)
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.models import ModelConfig, init_params, load_tokenizer, save_model
from kvpop_jax.scorers import MLPSettings, MLSTMSettings

TINY_MATH = Path(__file__).parents[2] / "assets" / "qwen3-tiny-math"


def save_base(folder: Path) -> None:
    """A random model of one layer and two KV heads, with the tokenizer of the small model."""
    tokenizer = load_tokenizer(TINY_MATH)
    config = ModelConfig(
        family="qwen3", vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tie_embeddings=False,
        qk_norm=True, max_position=2048, bos_token_id=None, eos_token_ids=(tokenizer.eos_token_id,), pad_token_id=0,
    )  # fmt: skip
    save_model(folder, config, init_params(config, jax.random.key(0), jnp.float32), tokenizer, jnp.float32)


def distillation(base: Path, output: Path, **changes) -> TrainConfig:
    """KVpop on that model: its weights and its recurrent scorer, two budgets."""
    config = TrainConfig(
        name="run",
        output_dir=str(output),
        steps=4,
        batch_size=8,
        seq_len=64,
        model=ModelSource(source=str(base)),
        policy=PolicyConfig(name="kvpop", sinks=2, window=4, budgets=(40, 32)),
        scorer=ScorerConfig(mlstm=MLSTMSettings(skip_width=4)),
        data=DataConfig(source="tiny_math", overlong="truncate"),
        checkpoint=CheckpointConfig(every=2, keep=2),
        log=LogConfig(every=2, tensorboard=False),
        eval=EvalSettings(
            policies=("streaming_llm",), budgets=(64,), problems=2, batch_size=1, max_new_tokens=4, window=8
        ),
    )
    return replace(config, **changes)


def stateless(base: Path, output: Path, **changes) -> TrainConfig:
    """The same with the stateless scorer, which compiles in half the time."""
    policy = PolicyConfig(name="kvpop_mlp", sinks=2, window=4, budgets=(40, 32))
    return distillation(base, output, policy=policy, scorer=ScorerConfig(mlp=MLPSettings(width=4)), **changes)


def losses(output: Path) -> list[tuple[int, float]]:
    """(step, loss) of a run, as it stands on disk."""
    rows = [json.loads(line) for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def write_config(config: TrainConfig, path: Path) -> None:
    path.write_text(cli.to_yaml(config))
