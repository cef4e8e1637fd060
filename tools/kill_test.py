"""Kills a tiny training again and again and compares what is left with a run that nobody disturbed.

    python tools/kill_test.py --kills 20 --seed 0

Moments are drawn: after a step, a fraction of a second later, so that a checkpoint may be half written; one in four
while the process is still starting. Exits 1 if a restart fails, finds less than the latest complete checkpoint, meets
one that it cannot read, or if the losses at the end differ in any bit.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvpop_jax import cli
from kvpop_jax.config import (
    CheckpointConfig,
    DataConfig,
    InitConfig,
    LogConfig,
    ModelSource,
    TrainConfig,
)
from kvpop_jax.errors import UserError
from kvpop_jax.training import loop

ROOT = Path(__file__).parents[1]


@dataclass
class Report:
    """What became of a run.

    Attributes:
        kills: how often it was killed while it ran.
        resumed: the steps that it went on from.
        lost: one line for every start that found less than it should have.
        losses, undisturbed: (step, loss) at the end, and of the run that was left alone.
    """

    kills: int = 0
    resumed: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    undisturbed: list[tuple[int, float]] = field(default_factory=list)


def tiny(output: Path, steps: int) -> TrainConfig:
    """A model that compiles in a second and whose steps take milliseconds."""
    sizes = InitConfig(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
    return TrainConfig(
        name="run",
        output_dir=str(output),
        method="pretrain",
        steps=steps,
        batch_size=2,
        seq_len=64,
        model=ModelSource(tokenizer=str(ROOT / "assets" / "qwen3-tiny-math"), init=sizes),
        data=DataConfig(source="tiny_math", overlong="truncate"),
        checkpoint=CheckpointConfig(every=5, keep=2),
        log=LogConfig(every=100, tensorboard=False),
    )


def kill_and_compare(folder: Path, steps: int, kills: int, seed: int) -> Report:
    """Trains twice in `folder`, killed so often and once alone."""
    draw, report = random.Random(seed), Report()
    config, log = tiny(folder / "killed", steps), folder / "killed.log"
    starting = 0.0  # seconds that the first start takes to come to its step
    # Steps to die after, increasing, so that the last one still has something to do.
    targets = sorted(draw.sample(range(1, steps - 1), kills))
    for target in targets:
        expected, began = _latest(config), time.monotonic()
        process = _start(config, log)
        if report.kills and draw.random() < 0.25:
            _sleep(process, draw.uniform(0, starting))
        else:
            _wait_for_step(process, config, target)
            starting = starting or time.monotonic() - began
            _sleep(process, draw.uniform(0, 0.2))
        process.kill()
        report.kills += process.wait() < 0
        _check(report, config, log, expected)
    expected = _latest(config)
    code = _start(config, log).wait()
    _check(report, config, log, expected)
    if code != 0:
        report.lost.append(f"the last start ended with {code}: {log.read_text()[-500:]}")
    report.losses = _losses(config)

    # Here: a process more would take longer to start than to train. And now: no other one needs the accelerator.
    whole = replace(config, output_dir=str(folder / "whole"))
    if loop.run(whole) != 0:
        raise RuntimeError("the undisturbed run did not reach its end")
    report.undisturbed = _losses(whole)
    return report


def _start(config: TrainConfig, log: Path) -> subprocess.Popen[bytes]:
    path = log.with_suffix(".yaml")
    path.write_text(cli.to_yaml(config))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "train.py", "--config", str(path)], cwd=ROOT, env=environment, stdout=file, stderr=file
        )


def _sleep(process: subprocess.Popen[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        time.sleep(0.005)


def _wait_for_step(process: subprocess.Popen[bytes], config: TrainConfig, step: int) -> None:
    while process.poll() is None and (not (done := _losses(config)) or done[-1][0] < step):
        time.sleep(0.005)


def _losses(config: TrainConfig) -> list[tuple[int, float]]:
    """Of the rows that are whole."""
    path = Path(config.output_dir) / config.name / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(row["step"], row["loss"]) for row in rows]


def _latest(config: TrainConfig) -> int:
    """The latest checkpoint that carries its final name."""
    folder = Path(config.output_dir) / config.name / "checkpoints"
    return max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=0)


def _check(report: Report, config: TrainConfig, log: Path, expected: int) -> None:
    text = log.read_text()
    if "cannot be read" in text:
        report.lost.append(next(line for line in text.splitlines() if "cannot be read" in line))
    resumed = re.search(r"resuming .* at step (\d+)", text)
    if resumed is None:
        return  # killed before it came to that, or there was nothing to resume
    report.resumed.append(int(resumed[1]))
    if int(resumed[1]) != expected:
        report.lost.append(f"resumed at step {resumed[1]}, with a checkpoint of step {expected}")
    # A step's row is written before its save begins, and one save, the last, may have been under way.
    every, done = config.checkpoint.every, _losses(config)
    if done and _latest(config) < (done[-1][0] - 1) // every * every - every:
        report.lost.append(f"step {done[-1][0]} was done, and the latest checkpoint is of step {_latest(config)}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if not 0 <= options.kills <= options.steps - 2:
        raise UserError(f"--kills {options.kills}: between 0 and --steps less 2, for each has a step of its own")
    with tempfile.TemporaryDirectory() as folder:
        report = kill_and_compare(Path(folder), options.steps, options.kills, options.seed)
    print(f"killed {report.kills} times, resumed at steps {', '.join(map(str, report.resumed))}")
    for line in report.lost:
        print(f"LOST: {line}")
    same = report.losses == report.undisturbed
    print(f"{len(report.losses)} losses, {'equal to' if same else 'DIFFERENT from'} those of the undisturbed run")
    return 0 if same and not report.lost else 1


if __name__ == "__main__":
    cli.run(main)
