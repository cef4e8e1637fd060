"""What a run says about itself: metrics.jsonl, TensorBoard, a progress bar; and whether its numbers are numbers."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from kvpop_jax.config import LogConfig
from kvpop_jax.errors import UserError


class DivergedError(Exception):
    """A loss or gradient is NaN or infinite; the message names the step and the culprit."""


def check_finite(step: int, metrics: Mapping[str, np.ndarray], part_names: Mapping[str, Sequence[str]]) -> None:
    """Raises `DivergedError` for the first metric of a step that is not finite, naming layer or part of the weights.

    Args:
        step: the step, counted from 1.
        metrics: fetched metrics of the step, as `make_step` returns them.
        part_names: per group, what `part_norms/GROUP` is of.
    """
    # Causes before effects: the parts of the loss, the loss, gradients.
    for name in sorted(metrics, key=lambda name: (name.startswith(("grad_norm/", "part_norms/")), name == "loss")):
        value = metrics[name]
        bad = np.flatnonzero(~np.isfinite(np.atleast_1d(value)))
        if bad.size == 0:
            continue
        group = name.partition("/")[2]
        if name.startswith("grad_norm/"):
            parts = np.flatnonzero(~np.isfinite(metrics[f"part_norms/{group}"]))
            where = ", ".join(part_names[group][part] for part in parts[:4]) or "sum of all parts"
            raise DivergedError(f"step {step}: the gradient of {group} is {np.asarray(value)} ({where})")
        layers = f" in layer {', '.join(map(str, bad[:8]))}" if np.ndim(value) else ""
        raise DivergedError(f"step {step}: {name} is {np.atleast_1d(value)[bad[0]]}{layers}")


@dataclass
class Recorder:
    """Writes one row per step, to metrics.jsonl, to TensorBoard and to the terminal.

    Attributes:
        settings: how often to print, and whether to write TensorBoard events.
        steps: last step of the run.
        rows: metrics.jsonl, open for appending.
        board: tensorboardX writer, or None.
        bar: progress bar on a terminal, or None.
        since: clock when the last row was written, for tokens per second.
    """

    settings: LogConfig
    steps: int
    rows: TextIO
    board: Any
    bar: Any
    since: float = field(default_factory=time.perf_counter)

    def record(self, step: int, metrics: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> None:
        """Adds the row of a step: scalars, and values per layer as their mean and, under `layers`, one by one."""
        now = time.perf_counter()
        seconds, self.since = now - self.since, now
        row: dict[str, Any] = {"step": step}
        shown = {name: np.asarray(value) for name, value in metrics.items() if not name.startswith("part_norms/")}
        row |= {name: float(value.mean()) for name, value in shown.items()}
        row |= dict(counts) | {"seconds": round(seconds, 4), "tokens_per_second": round(counts["tokens"] / seconds, 1)}
        layers = {name: [float(x) for x in value] for name, value in shown.items() if value.ndim}
        self.rows.write(json.dumps(row | ({"layers": layers} if layers else {})) + "\n")
        self.rows.flush()
        if self.board is not None:
            for name, value in row.items():
                self.board.add_scalar(name, value, step)
        self._show(step, row)

    def close(self) -> None:
        """Finishes the files and the bar."""
        self.rows.close()
        if self.board is not None:
            self.board.close()
        if self.bar is not None:
            self.bar.close()

    def _show(self, step: int, row: Mapping[str, Any]) -> None:
        words = {name: f"{value:.4g}" for name, value in row.items() if "/" not in name and name in _PRINTED}
        if self.bar is not None:
            self.bar.set_postfix(words, refresh=False)
            self.bar.update(step - self.bar.n)
        elif step % self.settings.every == 0 or step == self.steps:
            text = "  ".join(f"{name} {value}" for name, value in words.items())
            print(f"step {step}/{self.steps}  {text}", flush=True)


_PRINTED = (
    "cross_entropy", "accuracy", "kl", "agreement", "boundary", "kept_mass", "recall", "keep_rate", "lambda",
    "tokens_per_second",
)  # fmt: skip


def open_recorder(folder: Path, settings: LogConfig, *, start: int, steps: int) -> Recorder:
    """Continues the logs of a run at step `start`: rows of later steps, which a killed run left behind, are dropped."""
    path = folder / "metrics.jsonl"
    kept = []
    if path.exists():
        kept = [line for line in path.read_text().splitlines(keepends=True) if _step_of(line) <= start]
    path.write_text("".join(kept))
    board = _open_board(folder / "tensorboard", start) if settings.tensorboard else None
    bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True) if sys.stderr.isatty() else None
    return Recorder(settings, steps, path.open("a"), board, bar)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf  # the last line of a killed run may be cut


def _open_board(folder: Path, start: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise UserError("log.tensorboard needs tensorboardX: pip install tensorboardX, or set it to false") from error
    return SummaryWriter(str(folder), purge_step=start + 1)
