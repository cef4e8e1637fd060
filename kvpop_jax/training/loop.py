"""A training run from its folder to its results: train (or resume), export, evaluate."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvpop_jax import cli, sharding
from kvpop_jax.config import TrainConfig
from kvpop_jax.errors import UserError
from kvpop_jax.models import load_model
from kvpop_jax.processes import is_first, wait_for_all
from kvpop_jax.scorers.files import check_sizes, load_scorer
from kvpop_jax.training import checkpoint
from kvpop_jax.training.data import to_batch
from kvpop_jax.training.metrics import Recorder, check_finite, open_recorder
from kvpop_jax.training.rollout import write_rollouts
from kvpop_jax.training.setup import Setup, prepare_pretrain
from kvpop_jax.training.setup_distill import prepare_distill, scorer_settings
from kvpop_jax.training.stacked import Stacked, map_parts
from kvpop_jax.training.step import TrainState, init_state, make_measure, make_step, part_names

PREPARE = {"pretrain": prepare_pretrain, "distill": prepare_distill}


def run(config: TrainConfig) -> int:
    """Does whatever is left of a run: called again after an interruption, it resumes where it stopped.

    Writes `output_dir`/`name`/{config.yaml, metrics.jsonl, tensorboard/, checkpoints/, export/, eval/}, or rollouts/.
    Several processes share that folder; the first writes all but the checkpoints.

    Returns:
        The exit code: 0, also when SIGTERM stopped training after it saved a checkpoint; 130 when Ctrl-C did.

    Raises:
        UserError: a configuration that cannot be run, or another one than the run folder was made with.
        DivergedError: a loss or gradient is not finite. The checkpoints stay as they were.
    """
    folder = Path(config.output_dir) / config.name
    _claim(folder, config)
    if config.method == "rollout":
        try:
            write_rollouts(config, folder / "rollouts")
        except KeyboardInterrupt as stop:
            print("stopped; the same command goes on where it was")
            return cli.exit_code(stop)
        return 0
    exported, evaluated = (folder / "export").exists(), not config.evaluate or _is_evaluated(folder / "eval")
    wait_for_all("looked")  # before the first of them finishes anything
    if exported and evaluated:
        print(f"{folder} is finished; give another name to train again")
        return 0
    if not evaluated:
        _check_evaluation(config)
    if not exported and (signal_number := train_and_export(config, folder)):
        print(f"stopped by {signal.Signals(signal_number).name}; the same command resumes", flush=True)
        return 0 if signal_number == signal.SIGTERM else 128 + signal_number
    if not evaluated:
        evaluate(config, folder)
    return 0


def train_and_export(config: TrainConfig, folder: Path) -> int:
    """Trains from the latest checkpoint, or from the start, to the last step, and writes `export/`.

    Returns:
        0, or the signal that asked to stop; a checkpoint is then saved and nothing exported.
    """
    mesh = sharding.global_mesh(config.mesh)
    sharding.check_rows(config.batch_size // config.accumulate, mesh, "batch_size / accumulate")
    if mesh.size > 1:
        print(f"mesh {', '.join(f'{name} {size}' for name, size in mesh.shape.items())}", flush=True)
    with jax.set_mesh(mesh):
        setup = PREPARE[config.method](config, mesh)
        with contextlib.closing(setup.data):
            # Placed explicitly, as a restored state is: the step is then compiled the same for both.
            state = sharding.make_on(mesh, partial(init_state, optimizers=setup.optimizers), setup.weights)
            map_parts(_delete_list, setup.weights)  # stacked in the state, and not needed twice
            state, start = checkpoint.resume(folder / "checkpoints", state, setup.data)
            if start:
                print(f"resuming {folder} at step {start}", flush=True)
            with checkpoint.open_checkpoints(folder / "checkpoints", config.checkpoint) as saved, _signals() as caught:
                state, stopped = _train(config, setup, state, start, folder, saved, StopRequest(caught, mesh))
        if stopped:
            return stopped
        weights = map_parts(_fetch, state.weights)
    if is_first():
        # The folder gets its name when everything in it is complete: that is how a finished run is known.
        scratch = folder / "export.partial"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        setup.export(scratch, weights)
        os.replace(scratch, folder / "export")
        print(f"exported to {folder / 'export'}", flush=True)
    wait_for_all("exported")
    return 0


def _delete_list(part: Any) -> None:
    """Frees what was stacked; leaves outside of lists belong to the state now, and the step takes them over."""
    if isinstance(part, list):
        jax.tree.map(lambda leaf: leaf.delete(), part)


def _fetch(part: Any) -> Any:
    """Weights in this process's memory, layers as a list, one after the other: devices need not hold all of them."""
    if isinstance(part, Stacked):
        return [_fetch(layer) for layer in part]
    return sharding.on_host(part, keep=is_first())


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


@dataclass
class StopRequest:
    """Whether to stop after a step, the same answer in every process.

    Alone, a process knows at once. Several learn after each step what any of them had caught before it: the exchange is
    queued behind the step, so that nobody waits for it.
    """

    caught: _Caught
    mesh: Mesh
    _queued: jax.Array | None = None

    def __post_init__(self) -> None:
        self._every = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        self._highest = jax.jit(jnp.max, out_shardings=NamedSharding(self.mesh, PartitionSpec()))

    def after_step(self) -> int:
        """The signal that asks to stop, 0 for none; to be called once a step."""
        if jax.process_count() == 1:
            return self.caught.signal
        known = 0 if self._queued is None else int(self._queued)
        caught = np.full(self.mesh.size, self.caught.signal, np.int32)
        own = jax.make_array_from_callback(caught.shape, self._every, lambda index: caught[index])
        self._queued = self._highest(own)
        return known


def _train(
    config: TrainConfig,
    setup: Setup,
    state: TrainState,
    start: int,
    folder: Path,
    saved: Any,
    request: StopRequest,
) -> tuple[TrainState, int]:
    """The state after the last step and 0, or after an earlier step and the signal that asked to stop there."""
    if start >= config.steps:
        return state, 0  # all is trained, and an export was interrupted
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    pools, seed = setup.pools, config.seed
    step_function = make_step(
        setup.objective, setup.optimizers, pools=pools, seed=seed, accumulate=config.accumulate, state_shardings=placed
    )
    measure = setup.measure and make_measure(setup.measure, pools=pools, seed=seed, everywhere=placed.step)
    names = {group: part_names(tree) for group, tree in state.weights.items()}
    recorder = open_recorder(folder, config.log, start=start, steps=config.steps) if is_first() else None
    pending: tuple[int, dict[str, Any], dict[str, int]] | None = None
    losses: list[float] = []
    with contextlib.closing(recorder) if recorder else contextlib.nullcontext():
        for step in range(start + 1, config.steps + 1):
            arrays, counts = to_batch(next(setup.data))
            batch = sharding.place(arrays, request.mesh)
            measured = {}
            if measure is not None and (step % config.log.every == 0 or step == 1):
                measured = measure(state.weights, setup.frozen, batch, state.step)
            state, metrics = step_function(state, setup.frozen, batch)
            metrics |= measured
            # Fetching waits for the device, so each step's numbers are fetched while the next one runs.
            if pending is not None:
                losses.append(_record(recorder, names, *pending))
            pending = step, metrics, counts
            stop = request.after_step()
            last = step == config.steps or bool(stop)
            if last or step % config.checkpoint.every == 0:
                losses.append(_record(recorder, names, *pending))
                pending = None
                checkpoint.save(saved, step, state, setup.data, float(np.mean(losses)))
                losses = []
            if last:
                return state, stop if step < config.steps else 0
    raise AssertionError("the last step returns")


def _record(
    recorder: Recorder | None, names: dict[str, list[str]], step: int, metrics: dict[str, Any], counts: dict[str, int]
) -> float:
    """Looks at a step's numbers, writes them down where there is a recorder, and gives back the loss."""
    fetched: dict[str, np.ndarray] = jax.device_get(metrics)
    check_finite(step, fetched, names)
    if recorder is not None:
        recorder.record(step, fetched, counts)
    return float(fetched["loss"])


def evaluate(config: TrainConfig, folder: Path) -> None:
    """Runs the evaluation of the configuration on what was exported, and prints its table."""
    # Graders and plots are needed now, not by those who only train.
    from kvpop_jax.evaluation.report import format_table
    from kvpop_jax.evaluation.runner import run_evaluation

    export = folder / "export"
    trained_model = (export / "config.json").exists()
    dtype = None if config.dtype == "auto" else config.dtype
    mesh = sharding.local_mesh(config.eval.mesh)
    with jax.set_mesh(mesh):
        model = load_model(str(export) if trained_model else str(config.model.source), dtype, mesh)
        scorers = {}
        if (export / "scorer.json").exists():
            scorer = load_scorer(export, model)
            scorers[scorer.policy] = scorer
        rows = run_evaluation(model, config.eval, scorers, folder / "eval")
    if is_first():
        print(format_table(rows))


def _check_evaluation(config: TrainConfig) -> None:
    """Refuses before the training what its evaluation would be refused for after it.

    Raises:
        UserError: naming the field of `eval`.
    """
    # Graders are needed only by those who evaluate.
    from kvpop_jax.evaluation import tasks
    from kvpop_jax.evaluation.contestants import check_policies

    settings, trained = config.eval, config.policy
    scored = config.method == "distill" and scorer_settings(config) is not None
    try:
        check_policies(settings, (trained.name,) if scored else ())
        if scored and any(trained.name in name.split("+") for name in settings.policies):
            check_sizes(
                trained.name,
                trained,
                sinks=trained.sinks if settings.sinks is None else settings.sinks,
                window=trained.window if settings.window is None else settings.window,
                budgets=settings.budgets,
            )
        for task in tasks.select(settings.tasks):
            task.check(settings)
    except UserError as error:
        raise UserError(f"eval: {error}") from error


def _is_evaluated(folder: Path) -> bool:
    path = folder / "results.json"
    return path.exists() and json.loads(path.read_text())["complete"]


def _claim(folder: Path, config: TrainConfig) -> None:
    """Makes the run folder, or checks that it is of the same configuration.

    A folder that holds a configuration and nothing else is of a run that was refused before it began: the corrected
    command takes it over.
    """
    path = folder / "config.yaml"
    begun = path.exists() and any(not other.name.startswith("config.") for other in folder.iterdir())
    if not begun:
        cli.check_output(folder, "output_dir")
        if is_first():
            folder.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(".partial")
            scratch.write_text(cli.to_yaml(config))
            os.replace(scratch, path)  # another process may be about to read it
        return
    changed = list(cli.differences(_what(yaml.safe_load(path.read_text())), _what(cli.to_plain(config))))
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"{folder} holds a run with another configuration ({'; '.join(changed[:3])}{more}); change name"
        )


def _what(plain: dict[str, Any]) -> dict[str, Any]:
    """A configuration without the sections that say where it runs: they may change when a run goes on."""
    where = ("mesh", "processes")
    evaluation = {name: value for name, value in (plain.get("eval") or {}).items() if name not in where}
    return {name: value for name, value in plain.items() if name not in where} | {"eval": evaluation}
