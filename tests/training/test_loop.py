"""A run from start to finish, killed, interrupted, repeated, and gone wrong. The model is as small as it gets."""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kvpop_jax import cli
from kvpop_jax.config import (
    CheckpointConfig,
    DataConfig,
    InitConfig,
    LogConfig,
    ModelSource,
    OptimizerConfig,
    PolicyConfig,
    ScheduleConfig,
    TrainConfig,
)
from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.models import load_model
from kvpop_jax.processes import ProcessSettings
from kvpop_jax.sharding import MeshSettings
from kvpop_jax.training import loop
from kvpop_jax.training.metrics import DivergedError
from kvpop_jax.training.step import make_step

TINY_MATH = Path(__file__).parents[2] / "assets" / "qwen3-tiny-math"


def _config(folder, **changes):
    init = InitConfig(
        hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_position=1024
    )
    settings = dict(
        name="run",
        output_dir=str(folder),
        method="pretrain",
        steps=5,
        batch_size=2,
        seq_len=64,
        model=ModelSource(tokenizer=str(TINY_MATH), init=init),
        data=DataConfig(source="tiny_math", overlong="truncate"),
        checkpoint=CheckpointConfig(every=2, keep=2),
        log=LogConfig(every=2, tensorboard=False),
        optimizer=OptimizerConfig(base=ScheduleConfig(lr=1e-2, warmup=0)),
    )
    return TrainConfig(**(settings | changes))


def _rows(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def _losses(folder):
    return [(row["step"], row["loss"], row["grad_norm/base"]) for row in _rows(folder)]


def _at_batch(monkeypatch, number, action):
    """Does `action` when batch `number` of the process is taken."""
    taken, to_batch = [], loop.to_batch

    def counted(arrays):
        taken.append(None)
        if len(taken) == number:
            action()
        return to_batch(arrays)

    monkeypatch.setattr(loop, "to_batch", counted)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert loop.run(_config(folder)) == 0
    return folder


@pytest.mark.core
def test_a_run_leaves_its_configuration_metrics_checkpoints_and_model(undisturbed):
    folder = undisturbed / "run"
    assert cli.parse(TrainConfig, ["--config", str(folder / "config.yaml")]) == _config(undisturbed)
    rows = _rows(undisturbed)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert {"cross_entropy", "accuracy", "lr/base", "tokens_per_second", "overlong"} <= rows[0].keys()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["4", "5"]  # keep: 2
    model = load_model(str(folder / "export"))
    assert model.config.num_layers == 1
    assert model.config.eos_token_ids == (model.tokenizer.eos_token_id,)


def test_training_learns(undisturbed):
    losses = [row["loss"] for row in _rows(undisturbed)]
    assert losses[-1] < losses[0]
    assert abs(losses[0] - np.log(203)) < 0.5  # a new model knows nothing of its 203 tokens


@pytest.mark.core
def test_a_killed_run_resumes_with_the_same_next_losses(undisturbed, tmp_path, monkeypatch):
    def die():
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        _at_batch(patch, 4, die)  # after the checkpoint of step 2; step 3 has run, and may be in the log
        with pytest.raises(RuntimeError, match="killed"):
            loop.run(_config(tmp_path))
    assert not (tmp_path / "run" / "export").exists()
    assert loop.run(_config(tmp_path)) == 0
    assert _losses(tmp_path) == _losses(undisturbed)


def test_a_signal_saves_and_stops_and_the_same_command_goes_on(undisturbed, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        _at_batch(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert loop.run(_config(tmp_path)) == 0
    assert "stopped by SIGTERM; the same command resumes" in capsys.readouterr().out
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2, 3]
    assert loop.run(_config(tmp_path)) == 0
    assert _losses(tmp_path) == _losses(undisturbed)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(undisturbed, tmp_path, capsys):
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "export")
    config = _config(tmp_path)
    (tmp_path / "run" / "config.yaml").write_text(cli.to_yaml(config))
    folder = tmp_path / "run" / "checkpoints"
    (manifest,) = (folder / "5" / "state").glob("manifest.ocdbt")
    manifest.write_bytes(manifest.read_bytes()[:20])
    assert loop.run(config) == 0
    said = capsys.readouterr().out
    assert f"checkpoint {folder / '5'} cannot be read" in said and "at step 4" in said
    assert (folder.parent / "unreadable_checkpoints" / "5").exists()
    assert _losses(tmp_path) == _losses(undisturbed)


def test_checkpoints_of_which_none_can_be_read_are_left_alone(undisturbed, tmp_path):
    shutil.copytree(undisturbed / "run" / "checkpoints", tmp_path / "run" / "checkpoints")
    for file in (tmp_path / "run" / "checkpoints").rglob("_METADATA"):
        file.unlink()
    with pytest.raises(UserError, match="none of its 2 checkpoints can be read"):
        loop.run(_config(tmp_path))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["4", "5"]


def test_the_best_checkpoint_is_kept_beside_the_latest(tmp_path):
    # Later means are lower here only by what is learned; the first save is made the best by a rate that then explodes.
    rate = ScheduleConfig(lr=3.0, warmup=5, shape="constant")
    config = _config(
        tmp_path, checkpoint=CheckpointConfig(every=1, keep=1, keep_best=1), optimizer=OptimizerConfig(base=rate)
    )
    assert loop.run(config) == 0
    best = min(_losses(tmp_path), key=lambda row: row[1])[0]
    names = sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert best != 5 and names == [best, 5]


def test_a_run_goes_on_where_it_is_told_to(undisturbed, tmp_path):
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    config = _config(tmp_path)
    (tmp_path / "run" / "config.yaml").write_text(cli.to_yaml(config))
    assert loop.run(replace(config, processes=ProcessSettings(detect=True))) == 0  # finished, and no other run
    shutil.rmtree(tmp_path / "run" / "export")
    with pytest.raises(UserError, match="mesh data=1, fsdp=2, model=1 needs 2 devices, not 1"):
        loop.run(replace(config, mesh=MeshSettings(fsdp=2)))


def test_a_finished_run_says_so_and_does_nothing(undisturbed, capsys):
    before = (undisturbed / "run" / "metrics.jsonl").read_text()
    assert loop.run(_config(undisturbed)) == 0
    assert "is finished" in capsys.readouterr().out
    assert (undisturbed / "run" / "metrics.jsonl").read_text() == before


def test_a_run_folder_of_another_configuration_is_refused(undisturbed):
    with pytest.raises(UserError, match=r"batch_size: 2, now 4"):
        loop.run(_config(undisturbed, batch_size=4))


def test_a_command_that_was_refused_does_not_keep_the_corrected_one_out(tmp_path):
    misspelt = DataConfig(source="files", paths=(str(tmp_path / "none.jsonl"),))
    with pytest.raises(UserError, match=r"none\.jsonl does not exist"):
        loop.run(_config(tmp_path, data=misspelt))
    loop._claim(tmp_path / "run", _config(tmp_path))
    assert cli.parse(TrainConfig, ["--config", str(tmp_path / "run" / "config.yaml")]) == _config(tmp_path)
    (tmp_path / "run" / "metrics.jsonl").write_text("")  # it has begun
    with pytest.raises(UserError, match="another configuration"):
        loop._claim(tmp_path / "run", _config(tmp_path, data=misspelt))


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output_dir: .*/file is a file"):
        loop.run(_config(tmp_path / "file"))


def test_bad_data_is_found_before_a_model_is_loaded(tmp_path):
    model, data = ModelSource(source=str(tmp_path)), DataConfig(source="files", paths=(str(tmp_path / "none.jsonl"),))
    for method in ("pretrain", "distill"):
        with pytest.raises(UserError, match=r"none\.jsonl does not exist"):
            loop.run(_config(tmp_path, name=method, method=method, model=model, data=data))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(policies=("dense", "nonesuch")), "eval: unknown policy 'nonesuch'"),
        (dict(policies=("kvpop_mlp",)), "eval: policy kvpop_mlp needs a trained scorer"),
        (dict(tasks=("nonesuch",)), "eval: unknown task 'nonesuch'"),
        (dict(tasks=("aime25",), data_dir="nowhere"), r"eval: aime25: no file nowhere/aime25\.jsonl"),
        (dict(plan=("nowhere.yaml",)), r"eval: plan: no file nowhere\.yaml"),
        (dict(window=9), "eval: window is 9; the scorer of kvpop was trained with 8"),
        (dict(budgets=(48,)), "eval: a budget of 48 was asked for; the scorer of kvpop was trained for 32"),
    ],
)
def test_an_evaluation_that_cannot_run_is_refused_before_the_training(tmp_path, asked, message):
    evaluation = EvalSettings(**(dict(policies=("dense", "kvpop"), budgets=(32,)) | asked))
    policy, nothing = PolicyConfig(window=8, budgets=(32,)), ModelSource(source=str(tmp_path / "none"))
    config = _config(tmp_path, method="distill", model=nothing, policy=policy, evaluate=True, eval=evaluation)
    with pytest.raises(UserError, match=message):
        loop.run(config)


def test_divergence_stops_the_run_and_keeps_the_good_checkpoint(tmp_path, monkeypatch):
    def poisoned(*args, **settings):
        step = make_step(*args, **settings)

        def run(state, frozen, batch):
            state, metrics = step(state, frozen, batch)
            broken = jnp.where(state.step == 4, jnp.nan, metrics["cross_entropy"])
            return state, metrics | {"cross_entropy": broken}

        return run

    monkeypatch.setattr(loop, "make_step", poisoned)
    config = _config(tmp_path)
    with pytest.raises(DivergedError, match="step 4: cross_entropy is nan"):
        loop.run(config)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2, 3]


def test_the_script_turns_errors_into_exit_codes(tmp_path, capsys, monkeypatch):
    import train

    argv = ["train.py", "--name", "run", "--model.source", str(tmp_path / "none"), "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as exit_:
        cli.run(train.main)
    assert exit_.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
