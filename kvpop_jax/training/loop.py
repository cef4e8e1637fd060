"""A training run from its folder to its results: train (or resume), export, evaluate."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from kvpop_jax import cli
from kvpop_jax.config import TrainConfig
from kvpop_jax.errors import UserError
from kvpop_jax.models import load_model
from kvpop_jax.scorers.files import load_scorer
from kvpop_jax.training import checkpoint
from kvpop_jax.training.data import to_batch
from kvpop_jax.training.metrics import Recorder, check_finite, open_recorder
from kvpop_jax.training.setup import Setup, prepare_pretrain
from kvpop_jax.training.setup_distill import prepare_distill
from kvpop_jax.training.step import TrainState, init_state, make_measure, make_step, part_names

PREPARE = {"pretrain": prepare_pretrain, "distill": prepare_distill}


def run(config: TrainConfig) -> int:
    """Does whatever is left of a run: called again after an interruption, it resumes where it stopped.

    Writes `output_dir`/`name`/{config.yaml, metrics.jsonl, tensorboard/, checkpoints/, export/, eval/}.

    Returns:
        The exit code: 0, or 128 + the signal that interrupted training after it saved a checkpoint.

    Raises:
        UserError: a configuration that cannot be run, or another one than the run folder was made with.
        DivergedError: a loss or gradient is not finite. The checkpoints stay as they were.
    """
    folder = Path(config.output_dir) / config.name
    _claim(folder, config)
    exported, evaluated = (folder / "export").exists(), not config.evaluate or _is_evaluated(folder / "eval")
    if exported and evaluated:
        print(f"{folder} is finished; give another name to train again")
        return 0
    if not exported and (signal_number := train_and_export(config, folder)):
        print(f"stopped by signal {signal_number}; the same command resumes")
        return 128 + signal_number
    if not evaluated:
        evaluate(config, folder)
    return 0


def train_and_export(config: TrainConfig, folder: Path) -> int:
    """Trains from the latest checkpoint, or from the start, to the last step, and writes `export/`.

    Returns:
        0, or the signal that asked to stop; a checkpoint is then saved and nothing exported.
    """
    setup = PREPARE[config.method](config)
    # Placed explicitly, as a restored state is: the step is then compiled the same for both.
    state = jax.device_put(init_state(setup.weights, setup.optimizers), jax.devices()[0])
    with (
        contextlib.closing(setup.data),
        checkpoint.open_checkpoints(folder / "checkpoints", config.checkpoint) as saved,
    ):
        start = checkpoint.latest_step(saved)
        if start:
            state = checkpoint.restore(saved, state, setup.data)
            print(f"resuming {folder} at step {start}")
        with _signals() as caught:
            state = _train(config, setup, state, start, folder, saved, caught)
    if caught.signal and int(state.step) < config.steps:
        return caught.signal
    # The folder gets its name when everything in it is complete: that is how a finished run is known.
    scratch = folder / "export.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    setup.export(scratch, state.weights)
    os.replace(scratch, folder / "export")
    print(f"exported to {folder / 'export'}")
    return 0


@dataclass
class _Caught:
    """The signal that asked the run to stop, 0 for none."""

    signal: int = 0


@contextlib.contextmanager
def _signals() -> Iterator[_Caught]:
    """Turns Ctrl-C and SIGTERM into a request to stop after the step; a second Ctrl-C stops at once."""
    caught = _Caught()

    def request(number: int, _frame: Any) -> None:
        if caught.signal:
            raise KeyboardInterrupt
        caught.signal = number

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _train(
    config: TrainConfig,
    setup: Setup,
    state: TrainState,
    start: int,
    folder: Path,
    saved: Any,
    caught: _Caught,
) -> TrainState:
    step_function = make_step(
        setup.objective, setup.optimizers, pools=setup.pools, seed=config.seed, accumulate=config.accumulate
    )
    measure = setup.measure and make_measure(setup.measure, pools=setup.pools, seed=config.seed)
    names = {group: part_names(tree) for group, tree in setup.weights.items()}
    recorder = open_recorder(folder, config.log, start=start, steps=config.steps)
    pending: tuple[int, dict[str, Any], dict[str, int]] | None = None
    with contextlib.closing(recorder):
        for step in range(start + 1, config.steps + 1):
            batch, counts = to_batch(next(setup.data))
            measured = {}
            if measure is not None and (step % config.log.every == 0 or step == 1):
                measured = measure(state.weights, setup.frozen, batch, state.step)
            state, metrics = step_function(state, setup.frozen, batch)
            metrics |= measured
            # Fetching waits for the device, so each step's numbers are fetched while the next one runs.
            if pending is not None:
                _record(recorder, names, *pending)
            pending = step, metrics, counts
            last = step == config.steps or bool(caught.signal)
            if last or step % config.checkpoint.every == 0:
                _record(recorder, names, *pending)
                pending = None
                checkpoint.save(saved, state, setup.data)
            if last:
                break
    return state


def _record(
    recorder: Recorder, names: dict[str, list[str]], step: int, metrics: dict[str, Any], counts: dict[str, int]
) -> None:
    fetched: dict[str, np.ndarray] = jax.device_get(metrics)
    check_finite(step, fetched, names)
    recorder.record(step, fetched, counts)


def evaluate(config: TrainConfig, folder: Path) -> None:
    """Runs the evaluation of the configuration on what was exported, and prints its table."""
    # Graders and plots are needed now, not by those who only train.
    from kvpop_jax.evaluation.report import format_table
    from kvpop_jax.evaluation.runner import run_evaluation

    export = folder / "export"
    trained_model = (export / "config.json").exists()
    dtype = None if config.dtype == "auto" else config.dtype
    model = load_model(str(export) if trained_model else str(config.model.source), dtype)
    scorers = {}
    if (export / "scorer.json").exists():
        scorer = load_scorer(export, model)
        scorers[scorer.policy] = scorer
    print(format_table(run_evaluation(model, config.eval, scorers, folder / "eval")))


def _is_evaluated(folder: Path) -> bool:
    path = folder / "results.json"
    return path.exists() and json.loads(path.read_text())["complete"]


def _claim(folder: Path, config: TrainConfig) -> None:
    """Makes the run folder, or checks that it is of the same configuration."""
    path = folder / "config.yaml"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(cli.to_yaml(config))
        return
    changed = list(cli.differences(yaml.safe_load(path.read_text()), cli.to_plain(config)))
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"{folder} holds a run with another configuration ({'; '.join(changed[:3])}{more}); change name"
        )
