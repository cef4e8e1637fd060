"""Runs policies x budgets x tasks on one model and writes what came out: rollouts.jsonl, results.json, report.md."""

import dataclasses
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import flax
import jax
import numpy as np
from tqdm import tqdm

from kvpop_jax import __version__
from kvpop_jax.evaluation import generation, reading, tasks
from kvpop_jax.evaluation.averages import averages
from kvpop_jax.evaluation.contestants import Contestant, contestants_of
from kvpop_jax.evaluation.jobs import Job
from kvpop_jax.evaluation.records import Rollout, append_rollouts, read_rollouts
from kvpop_jax.evaluation.report import write_report
from kvpop_jax.evaluation.rows import Row, differences, summarise
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.inference import BatchStatistics
from kvpop_jax.models import LoadedModel
from kvpop_jax.polykv import draw_plan, read_plan
from kvpop_jax.processes import is_first, wait_for_all
from kvpop_jax.scorers.files import LoadedScorer

SCHEMA_VERSION = 1
REFRESH_SECONDS = 0.5


def run_evaluation(
    model: LoadedModel, settings: EvalSettings, scorers: Mapping[str, LoadedScorer], output: Path, progress: bool = True
) -> list[Row]:
    """Evaluates the model under every policy and budget on every task.

    Rollouts are appended to `output/rollouts.jsonl` as they finish. Those already there that were made under the
    same conditions are not repeated, so an interrupted evaluation goes on where it stopped. Results and report are
    written even when it is interrupted, of what is finished, and say that they are incomplete.

    Several processes share the problems among them; each appends to a file of its own, `rollouts-1.jsonl` and so on,
    and the first writes the results of all.

    Args:
        model: The model to evaluate.
        settings: What to run.
        scorers: Loaded scorer by policy name, for the policies that have one.
        output: Folder to write to; made if missing.
        progress: Show progress bars.

    Returns:
        The rows of results.json; none in another than the first process.

    Raises:
        UserError: A policy or task is unknown, a scorer is missing, a budget impossible, a data file missing.
        KeyboardInterrupt: As raised, after the finished part was written.
    """
    chosen = tasks.select(settings.tasks)
    for task in chosen:
        task.check(settings)
    contestants = contestants_of(model, settings, scorers)
    output.mkdir(parents=True, exist_ok=True)
    index = jax.process_index()
    path = output / (f"rollouts-{index}.jsonl" if index else "rollouts.jsonl")
    finished = _read_all(output)
    wait_for_all("read")  # before any of the files grows
    plans = {task: _module(task).plan(task, model, contestants, settings) for task in chosen}
    complete = False
    rows: list[Row] = []
    batches: dict[str, dict[str, BatchStatistics]] = {}
    try:
        for task, jobs in plans.items():
            pending = [job for job in _share(jobs) if job.key not in finished]
            with _Progress(task.name, len(pending), progress and is_first()) as bar:
                batches[task.name] = bar.batches
                for rollouts in _module(task).run(task, pending, model, contestants, settings, bar):
                    append_rollouts(path, rollouts)
                    bar.rollouts(rollouts)
        wait_for_all("evaluated")
        complete = True
    finally:
        # The others' files may be growing when this one was interrupted.
        finished = _read_all(output) if complete else finished | read_rollouts(path)
        done = [finished[job.key] for jobs in plans.values() for job in jobs if job.key in finished]
        if done and is_first():
            contexts = {task.name: settings.context or task.context(settings) for task in chosen}
            rows = _write(output, model, settings, contexts, done, batches, complete)
    return rows


def _read_all(output: Path) -> dict[str, Rollout]:
    """Finished rollouts of all processes, in this run and in earlier ones."""
    return {
        key: rollout for path in sorted(output.glob("rollouts*.jsonl")) for key, rollout in read_rollouts(path).items()
    }


def _share(jobs: Sequence[Job]) -> list[Job]:
    """This process's part: whole problems, because what is done for one serves all that is asked of it."""
    numbers = {item: number for number, item in enumerate(dict.fromkeys(job.item for job in jobs))}
    return [job for job in jobs if numbers[job.item] % jax.process_count() == jax.process_index()]


def _module(task: tasks.Task) -> ModuleType:
    """The module that plans and runs tasks of that kind."""
    return generation if isinstance(task, tasks.GenerationTask) else reading


class _Progress:
    """A bar of rollouts done, with the policy at work, tokens per second, and its mean grade so far.

    Attributes:
        batches: How the batch of each contestant stands.
    """

    def __init__(self, name: str, total: int, shown: bool):
        self.batches: dict[str, BatchStatistics] = {}
        self._bar = tqdm(total=total, desc=name, unit="rollout", disable=not shown or not total)
        self._grades: dict[tuple[str, int | None], list[float]] = {}
        self._start = self._shown = time.perf_counter()
        self._scored, self._text = 0, ""

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error: object) -> None:
        shown = not self._bar.disable
        self._bar.close()
        if shown:
            for name, batch in self.batches.items():
                print(f"{self._bar.desc}, {name}: {_described(batch)}", file=sys.stderr)

    def tokens(self, count: int) -> None:
        """Counts tokens that were scored."""
        self._scored += count
        self._refresh()

    def batch(self, contestant: Contestant, statistics: BatchStatistics) -> None:
        """Takes note of how a contestant's batch stands."""
        self.batches[contestant.name] = statistics
        self._refresh()

    def _refresh(self) -> None:
        now = time.perf_counter()
        if now - self._shown > REFRESH_SECONDS:
            self._shown = now
            tokens = self._scored + sum(batch.tokens for batch in self.batches.values())
            self._bar.set_postfix_str(f"{tokens / (now - self._start):.0f} tokens/s{self._text}")

    def rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Counts rollouts that are finished and graded."""
        first = rollouts[0]
        metric = next(iter(first.grade))
        grades = self._grades.setdefault((first.policy, first.budget), [])
        grades += [rollout.grade[metric] for rollout in rollouts]
        name = first.policy if first.budget is None else f"{first.policy} {first.budget}"
        self._text = f", {name}: {metric} {np.mean(grades):.3f}"
        self._bar.update(len(rollouts))


def _described(batch: BatchStatistics) -> str:
    return (
        f"{batch.tokens_per_second:.0f} tokens/s, {batch.rows} rows {batch.occupancy:.0%} occupied; "
        f"mean (longest) wait for a row {batch.queue_wait_mean:.1f} ({batch.queue_wait_max:.1f}) s, "
        f"for the first token {batch.first_token_mean:.1f} ({batch.first_token_max:.1f}) s"
    )


def _write(
    output: Path,
    model: LoadedModel,
    settings: EvalSettings,
    contexts: dict[str, int],
    rollouts: Sequence[Rollout],
    batches: Mapping[str, Mapping[str, BatchStatistics]],
    complete: bool,
) -> list[Row]:
    rows = summarise(
        rollouts, model=model.source, contexts=contexts, pin_prompt=settings.pin_prompt, seed=settings.seed
    )
    compared = differences(rollouts, seed=settings.seed)
    averaged = averages(rollouts, tasks.groups(), seed=settings.seed)
    results = {
        "schema_version": SCHEMA_VERSION,
        "complete": complete,
        "model": {"source": model.source, "fingerprint": model.fingerprint},
        "settings": dataclasses.asdict(settings),
        "versions": versions(),
        "rows": [dataclasses.asdict(row) for row in rows],
        "differences": [dataclasses.asdict(difference) for difference in compared],
        "averages": [dataclasses.asdict(average) for average in averaged],
        # Of what was generated in this run, without what an interrupted one had finished.
        "batches": [
            {"task": task, "contestant": name, **dataclasses.asdict(batch)}
            for task, of_task in batches.items()
            for name, batch in of_task.items()
        ],
    }
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    pictures = [draw_plan(plan, output / f"plan_{plan.name}.png") for plan in map(read_plan, settings.plan)]
    write_report(output, rows, compared, _conditions(model, settings, complete), averaged, pictures)
    return rows


def versions() -> dict[str, str]:
    """What made a result: package, libraries, Python, and the kind of device."""
    return {
        "kvpop_jax": __version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def _conditions(model: LoadedModel, settings: EvalSettings, complete: bool) -> str:
    temperature = settings.sampling_temperature
    sampling = (
        "greedy" if temperature == 0 else f"temperature {temperature}, top-k {settings.top_k}, top-p {settings.top_p}"
    )
    pinned = "The prompt was exempt from eviction." if settings.pin_prompt else "The prompt could be evicted."
    quantised = "" if settings.cache_dtype is None else f"Keys and values were cached in {settings.cache_dtype}. "
    state = "" if complete else "**Incomplete: the evaluation was interrupted, and this is what had finished.** "
    return (
        f"{state}Model `{model.source}`; {settings.rollouts} rollout(s) per problem, {sampling}, seed {settings.seed}. "
        f"{pinned} {quantised}"
        f"Intervals are 95 %: bootstrap over problems for graded tasks, Student over windows for text. "
        f"A bootstrap of problems that all score alike has no width, which is not certainty."
    )
