"""Distillation as a run: what it leaves serves the model it belongs to, and a killed run goes on the same."""

import json
from dataclasses import replace
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest

from kvpop_jax.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelSource,
    PolicyConfig,
    ScorerConfig,
    TrainConfig,
)
from kvpop_jax.errors import UserError
from kvpop_jax.models import ModelConfig, init_params, load_model, load_tokenizer, save_model
from kvpop_jax.scorers import MLPSettings
from kvpop_jax.scorers.files import load_scorer
from kvpop_jax.sharding import make_mesh
from kvpop_jax.training import loop
from kvpop_jax.training.setup_distill import prepare_distill

TINY_MATH = Path(__file__).parents[2] / "assets" / "qwen3-tiny-math"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    tokenizer = load_tokenizer(TINY_MATH)
    config = ModelConfig(
        family="qwen3", vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tie_embeddings=True,
        qk_norm=True, max_position=64, bos_token_id=None, eos_token_ids=(tokenizer.eos_token_id,), pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("base") / "model"
    save_model(folder, config, init_params(config, jax.random.key(0), jnp.float32), tokenizer, jnp.float32)
    return folder


def _config(folder, base, **changes):
    settings = dict(
        name="run",
        output_dir=str(folder),
        steps=3,
        batch_size=2,
        seq_len=64,
        model=ModelSource(source=str(base)),
        policy=PolicyConfig(name="kvpop_mlp", sinks=2, window=4, budgets=(24, 12)),
        scorer=ScorerConfig(mlp=MLPSettings(width=4)),
        data=DataConfig(source="tiny_math", overlong="truncate"),
        checkpoint=CheckpointConfig(every=2, keep=1),
        log=LogConfig(every=2, tensorboard=False),
    )
    return TrainConfig(**(settings | changes))


def _rows(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_scorer_of_a_frozen_model_belongs_to_that_model(base, tmp_path):
    assert loop.run(_config(tmp_path, base, freeze_base=True)) == 0
    export = tmp_path / "run" / "export"
    scorer = load_scorer(export, load_model(str(base)), sinks=2, window=4, budgets=[24, 12])
    assert scorer.policy == "kvpop_mlp"
    assert not (export / "config.json").exists()
    rows = _rows(tmp_path)
    assert {"boundary", "kept_mass", "recall", "keep_rate", "lambda", "grad_norm/scorer", "tokens_per_second"} <= rows[
        0
    ].keys()
    assert len(rows[0]["layers"]["kept_mass"]) == 1
    assert all(row["grad_norm/scorer"] > 0 for row in rows)
    # The frozen model's distance from itself is measured when a line is printed.
    assert ["kl" in row for row in rows] == [True, True, False]


def test_a_killed_run_of_model_and_scorer_resumes_with_the_same_losses(base, tmp_path, monkeypatch):
    whole, killed = _config(tmp_path / "whole", base), _config(tmp_path / "killed", base)
    assert loop.run(whole) == 0
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_record", _raise_after(2, loop._record))
        with pytest.raises(RuntimeError, match="killed"):
            loop.run(killed)
    assert loop.run(killed) == 0
    timing = {"seconds", "tokens_per_second"}
    found, wanted = (
        [{name: value for name, value in row.items() if name not in timing} for row in _rows(tmp_path / name)]
        for name in ("killed", "whole")
    )
    assert found == wanted
    assert all(row["grad_norm/base"] > 0 and row["grad_norm/scorer"] > 0 for row in found)
    export = tmp_path / "killed" / "run" / "export"
    assert load_scorer(export, load_model(str(export))).budgets == (24, 12)
    with pytest.raises(UserError, match="belongs to"):
        load_scorer(export, load_model(str(base)))


def _raise_after(step, record):
    def recording(recorder, names, at, metrics, counts):
        if at > step:
            raise RuntimeError("killed")
        return record(recorder, names, at, metrics, counts)

    return recording


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (PolicyConfig(name="nothing"), "unknown policy 'nothing'"),
        (PolicyConfig(name="tova"), "no static priorities"),
        (PolicyConfig(name="dense"), "no static priorities"),
        (PolicyConfig(name="streaming_llm"), "nothing to train"),
        (PolicyConfig(name="kvpop", sinks=2, window=4, budgets=(8,)), "leaves no pool"),
    ],
)
def test_a_policy_that_cannot_be_trained_says_why(base, tmp_path, policy, message):
    with pytest.raises(UserError, match=message):
        loop.run(_config(tmp_path, base, policy=policy, freeze_base=True))


def test_a_pinned_prompt_that_is_too_long_names_the_problem(base, tmp_path):
    policy = PolicyConfig(name="kvpop_mlp", sinks=2, window=4, budgets=(12,), pin_prompt=True)
    with pytest.raises(UserError, match=r"tiny_math problem \d+: its prompt of \d+ tokens leaves no pool"):
        loop.run(_config(tmp_path, base, policy=policy, freeze_base=True))


def test_a_stage_starts_from_the_weights_of_the_one_before_and_learns_from_the_same_teacher(base, tmp_path):
    mesh = make_mesh(devices=jax.devices()[:1])
    first = prepare_distill(_config(tmp_path, base, seed=1), mesh)
    export = tmp_path / "first"
    export.mkdir()
    first.export(export, first.weights | {"base": jax.tree.map(lambda leaf: 1.5 * leaf, first.weights["base"])})
    second = _config(tmp_path, base, start_from=str(export))
    setup = prepare_distill(second, mesh)
    model, teacher = load_model(str(export), jnp.float32), load_model(str(base), jnp.float32)
    chex.assert_trees_all_equal(setup.weights["base"], model.params)
    chex.assert_trees_all_equal(setup.weights["scorer"], load_scorer(export, model).params)
    chex.assert_trees_all_equal(setup.frozen.embedding_VE, teacher.params.embedding_VE)
    assert float(jnp.abs(setup.frozen.embedding_VE - model.params.embedding_VE).max()) > 0
    with pytest.raises(UserError, match="trained with window 4, not 5"):
        prepare_distill(replace(second, policy=replace(second.policy, window=5)), mesh)
    with pytest.raises(UserError, match="has other sizes than the one configured"):
        prepare_distill(replace(second, scorer=ScorerConfig(mlp=MLPSettings(width=5))), mesh)
    with pytest.raises(UserError, match="start_from is for method distill"):
        replace(second, freeze_base=True)
