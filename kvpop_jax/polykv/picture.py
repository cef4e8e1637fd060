"""A plan as a picture: layers by phases coloured by policy, and the budgets as bars."""

from pathlib import Path

from kvpop_jax.polykv.plan import PHASES, Plan


def draw_plan(plan: Plan, path: Path) -> Path:
    """Writes the PNG."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = sorted({getattr(layer, phase) for layer in plan.layers for phase in PHASES})
    colours = {name: colormaps["tab20"](index % 20) for index, name in enumerate(names)}
    N = len(plan.layers)
    figure = Figure(figsize=(max(5.0, 0.32 * N + 2), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    cells, bars = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.6))
    for row, phase in enumerate(PHASES):
        for number, layer in enumerate(plan.layers):
            cells.barh(-row, 0.94, left=number - 0.47, height=0.9, color=colours[getattr(layer, phase)])
    cells.set_yticks([0, -1], PHASES)
    cells.set_title(f"{plan.name}: {plan.budget} entries per KV head on average")
    bars.bar(range(N), [layer.budget for layer in plan.layers], width=0.94, color="0.55")
    bars.axhline(plan.budget, color="black", linestyle="--", linewidth=1)
    bars.set_ylabel("entries")
    bars.set_xlabel("layer")
    bars.set_xlim(-0.6, N - 0.4)
    bars.xaxis.get_major_locator().set_params(integer=True)
    patches = [Patch(color=colours[name], label=name) for name in names]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 5), fontsize=8)
    figure.savefig(path, dpi=150)
    return path
