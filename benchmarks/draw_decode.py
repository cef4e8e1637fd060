"""Draws time and memory of long generations, beside what the KVpop paper shows.

    python benchmarks/decode.py --shape qwen3_8b --budget 4096 --window 256 --policies dense,streaming_llm,kvpop \\
        --length 131072 --positions 131072 --output long.json
    python benchmarks/draw_decode.py long.json long.png

The time of so many tokens is the integral of what a step takes at the positions before, linear between those timed and
constant outside them. The paper's points are read off its figure 4 (arXiv 2607.05061): one H100, its own code; to 60
seconds and 0.1 GB.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpop_jax import cli
from kvpop_jax.errors import UserError

_PAPER = {
    "dense": ((750, 2190, 8390, 32_900), (18.0, 20.6, 25.7, 35.8)),
    "DMS": ((760, 1500, 3040, 6150), (15.9, 16.5, 17.0, 17.6)),
    "kvpop": ((180, 420, 1030, 2530), (16.0, 16.3, 16.8, 18.0)),
}
"""Seconds and GB after as many generated tokens as `_LENGTHS` says."""
_LENGTHS = np.array([16, 32, 64, 128]) * 1024
_COLOURS = {"dense": "0.3", "DMS": "tab:olive", "streaming_llm": "tab:blue", "kvpop": "tab:red"}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="what decode.py wrote with --output, of one batch size")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    options = parser.parse_args(argv)
    draw(read(options.rows), options.picture)
    print(options.picture)
    return 0


def read(path: Path) -> dict[str, np.ndarray]:
    """Position, milliseconds a step and GB of each policy, [3, positions].

    Raises:
        UserError: the file is not there, is none of decode.py's, or has several batch sizes.
    """
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        points = [(row["policy"], row["position"], row["ms_per_step"], row["peak_bytes"] / 1e9) for row in rows]
        batches = {row["batch"] for row in rows}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: not what decode.py writes with --output ({error})") from error
    if len(batches) != 1:
        raise UserError(f"{path}: batch sizes {sorted(batches)}; draw one at a time")
    return {name: np.array(sorted(row[1:] for row in points if row[0] == name)).T for name, *_ in points}


def seconds(position: np.ndarray, ms: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Of generating so many tokens."""
    at = np.arange(int(length.max()) + 1)
    return np.cumsum(np.interp(at, position, ms))[length - 1] / 1e3


def draw(measured: dict[str, np.ndarray], path: Path) -> None:
    """Writes the picture: ours as lines, the paper's as crosses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    time, memory = figure.subplots(1, 2)
    for name, (position, ms, gb) in measured.items():
        length = np.linspace(4096, position.max(), 64).astype(int)
        time.plot(length, seconds(position, ms, length), color=_COLOURS.get(name), label=name)
        memory.plot(position, gb, color=_COLOURS.get(name), label=name)
    for name, (paper_seconds, paper_gb) in _PAPER.items():
        time.plot(_LENGTHS, paper_seconds, "x", color=_COLOURS[name], label=f"{name}, paper (H100)")
        memory.plot(_LENGTHS, paper_gb, "x", color=_COLOURS[name])
    time.set_yscale("log")
    time.set_ylabel("seconds")
    memory.set_ylabel("GB at most")
    for axes in (time, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(_LENGTHS, [f"{n // 1024}k" for n in _LENGTHS])
        axes.set_xlabel("tokens generated, batch 1")
        axes.grid(alpha=0.3)
    time.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    cli.run(main)
