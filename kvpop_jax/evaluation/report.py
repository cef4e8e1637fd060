"""What people read: the table in the terminal, report.md, and the plots of value against compression."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from kvpop_jax.evaluation.averages import Average
from kvpop_jax.evaluation.rows import Difference, Row

_COLUMNS = (
    "task", "policy", "budget", "compression", "metric", "value", "95 % interval", "retained", "n",
    "length", "cut", "prompt kept", "tokens/s", "cache",
)  # fmt: skip
_ACCOUNT_COLUMNS = (
    "policy", "budget", "sinks", "window", "pool", "state", "scratch", "peak live", "allocated", "type",
    "bytes per sequence",
)  # fmt: skip
_DIFFERENCE_COLUMNS = ("task", "budget", "metric", "policy", "difference", "95 % interval", "n")
_AVERAGE_COLUMNS = ("group", "policy", "budget", "value", "95 % interval", "tasks")
_LEFT = ("task", "group", "policy", "metric", "type")
EQUAL_BUDGETS = (
    "Budgets are entries per KV head with sinks, window, pool and the policy's own state counted. Compression is "
    "1 - entries / context. Two policies are compared only at equal budgets; `retained` is a row's value over the "
    "dense model's on the same problems."
)


def format_table(rows: Sequence[Row]) -> str:
    """The rows of whole tasks as aligned plain text for a terminal; the report has those of their groups too."""
    return _aligned(_COLUMNS, [_cells(row) for row in rows if not row.group])


def format_results(rows: Sequence[Row]) -> str:
    """The table, what the budgets were spent on, and how to read both: what a run prints at its end."""
    accounts = _aligned(_ACCOUNT_COLUMNS, _accounts(rows))
    return f"{format_table(rows)}\n\n{accounts}\n\n{textwrap.fill(EQUAL_BUDGETS, 120)}"


def write_report(
    folder: Path,
    rows: Sequence[Row],
    differences: Sequence[Difference],
    conditions: str,
    averages: Sequence[Average] = (),
    pictures: Sequence[Path] = (),
) -> Path:
    """Writes report.md and one plot per task into the folder.

    Args:
        folder: Exists.
        rows: As `summarise` orders them.
        differences: Paired differences at equal budgets.
        conditions: One paragraph: model, sampling, seed, pinning, whether the evaluation is complete.
        averages: Of the groups of tasks that were run.
    """
    lines = [
        "# Evaluation",
        "",
        conditions,
        "",
        EQUAL_BUDGETS,
        "",
        *_markdown(_COLUMNS, [_cells(row) for row in rows if not row.group]),
    ]
    if averages:
        lines += ["", "## Averages over tasks", "", "Every task has the same weight.", ""]
        lines += _markdown(_AVERAGE_COLUMNS, [_average_cells(average) for average in averages])
    for task in dict.fromkeys(row.task for row in rows):
        plot = plot_task(folder, task, rows)
        if plot is not None:
            lines += ["", f"![{task}: value against compression]({plot.name})"]
    if pictures:
        lines += ["", "## Plans", "", "Policy of every layer in both phases, and entries per KV head."]
        lines += [f"\n![{picture.stem}]({picture.name})" for picture in pictures]
    if differences:
        lines += ["", f"## {differences[0].reference} minus the others, at equal budgets", ""]
        lines += ["Paired on problems; an interval that excludes 0 tells the two apart.", ""]
        lines += _markdown(_DIFFERENCE_COLUMNS, [_difference_cells(difference) for difference in differences])
    groups = [_cells(row) for row in rows if row.group]
    if groups:
        lines += ["", "## By group", "", *_markdown(_COLUMNS, groups)]
    lines += ["", "## What the budgets were spent on", "", "In entries per KV head.", ""]
    lines += _markdown(_ACCOUNT_COLUMNS, _accounts(rows))
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def plot_task(folder: Path, task: str, rows: Sequence[Row]) -> Path | None:
    """A PNG with a panel per metric (value against compression) and one of retained accuracy; None without budgets."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    rows = [row for row in rows if row.task == task and not row.group]
    policies = list(dict.fromkeys(row.policy for row in rows if row.budget is not None))
    if not policies:
        return None
    metrics = list(dict.fromkeys(row.metric for row in rows))
    retained = [metric for metric in metrics[:1] if any(row.retained is not None for row in rows)]
    panels = [(metric, False) for metric in metrics] + [(metric, True) for metric in retained]
    figure = Figure(figsize=(4.8 * len(panels), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (metric, as_share) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for policy in policies:
            line = [row for row in rows if (row.policy, row.metric) == (policy, metric)]
            points = sorted(_point(row, as_share) for row in line if not as_share or row.retained is not None)
            if points:
                compression, value, below, above = zip(*points, strict=True)
                axes.errorbar(compression, value, (below, above), label=policy, marker="o", markersize=4, capsize=2)
        for row in rows:
            if row.budget is None and row.metric == metric:
                level = 1.0 if as_share else row.value
                axes.axhline(level, color="black", linestyle="--", linewidth=1, label=row.policy)
        axes.set_xlabel(f"compression (1 - entries / {rows[0].context:,})")
        axes.set_ylabel(f"retained {metric}" if as_share else metric)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_title(task)
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), fontsize=8)
    path = folder / f"{task}.png"
    figure.savefig(path, dpi=150)
    return path


def _point(row: Row, as_share: bool) -> tuple[float, float, float, float]:
    """Compression, value, and how far the interval reaches below and above it."""
    bounds = (row.retained, row.retained_low, row.retained_high) if as_share else (row.value, row.low, row.high)
    value, low, high = (math.nan if bound is None else bound for bound in bounds)
    # A bootstrap interval of a skewed mean may lie to one side of it; a bar has no negative length.
    return row.compression, value, max(0.0, value - low), max(0.0, high - value)


def _cells(row: Row) -> tuple[str, ...]:
    digits = 4 if row.metric in ("nll", "kl") else 3
    return (
        f"{row.task} ({row.group})" if row.group else row.task,
        row.policy + (" (prompt pinned)" if row.pin_prompt and row.budget is not None else ""),
        "-" if row.budget is None else str(row.budget),
        f"{row.compression:.1%}",
        row.metric,
        f"{row.value:.{digits}f}",
        "-" if row.low is None else f"[{row.low:.{digits}f}, {row.high:.{digits}f}]",
        "-" if row.retained is None else f"{row.retained:.3f}",
        str(row.n),
        f"{row.mean_length:.0f}",
        f"{row.cut_share:.1%}",
        f"{row.prompt_survival:.1%}",
        f"{row.tokens / row.seconds:.0f}" if row.seconds else "-",
        _bytes(row.cache_bytes),
    )


def _difference_cells(difference: Difference) -> tuple[str, ...]:
    return (
        difference.task,
        str(difference.budget),
        difference.metric,
        difference.policy,
        f"{difference.value:+.3f}",
        f"[{difference.low:+.3f}, {difference.high:+.3f}]",
        str(difference.n),
    )


def _average_cells(average: Average) -> tuple[str, ...]:
    return (
        average.group,
        average.policy,
        "-" if average.budget is None else str(average.budget),
        f"{average.value:.3f}",
        f"[{average.low:.3f}, {average.high:.3f}]",
        str(average.tasks),
    )


def _accounts(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Cells of what each policy's budget was spent on; peaks over all tasks."""
    by_contestant: dict[tuple[str, int | None], list[Row]] = {}
    for row in rows:
        by_contestant.setdefault((row.policy, row.budget), []).append(row)
    found = []
    for (policy, budget), own in by_contestant.items():
        parts = (own[0].sinks, own[0].window, own[0].pool, own[0].state_entries, own[0].scratch)
        found.append(
            (
                policy,
                "-" if budget is None else str(budget),
                *("-" if budget is None else str(part) for part in parts),
                str(max(row.peak_live for row in own)),
                str(max(row.allocated for row in own)),
                own[0].cache_dtype,
                _bytes(max(row.cache_bytes for row in own)),
            )
        )
    return found


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [columns, *rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    lines = []
    for line in cells:
        padded = [
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = "|" + "|".join("---" if name in _LEFT else "--:" for name in columns) + "|"
    return ["| " + " | ".join(columns) + " |", rule, *("| " + " | ".join(cells) + " |" for cells in rows)]


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
