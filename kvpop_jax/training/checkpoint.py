"""Resuming: weights, optimizer, step and data position in one atomic checkpoint (Orbax).

A checkpoint knows nothing of the mesh and the processes that wrote it: arrays are read back in whatever shards are
asked for, and the data position is one, of the rows of all processes together.
"""

import os
from pathlib import Path
from typing import Any

import grain
import jax
from orbax.checkpoint import v1 as ocp

from kvpop_jax.config import CheckpointConfig
from kvpop_jax.errors import UserError
from kvpop_jax.processes import all_hold, is_first, wait_for_all
from kvpop_jax.training.step import TrainState

_ASIDE = "unreadable_checkpoints"


def open_checkpoints(folder: Path, settings: CheckpointConfig) -> ocp.training.Checkpointer:
    """The checkpoints of a run, to be used as a context: leaving it waits for what is still being written.

    A checkpoint appears under its final name only when it is complete. Kept are the latest `settings.keep`, and
    `settings.keep_best` more of the lowest loss.
    """
    policies = ocp.training.preservation_policies
    best = policies.BestN(get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=settings.keep_best)
    kept = [policies.LatestN(settings.keep), *([best] if settings.keep_best else [])]
    return ocp.training.Checkpointer(
        folder.absolute(),
        preservation_policy=policies.AnyPreservationPolicy(kept),
        cleanup_tmp_directories=True,
    )


def save(
    checkpoints: ocp.training.Checkpointer, step: int, state: TrainState, data: grain.DatasetIterator, loss: float
) -> None:
    """Starts writing a checkpoint; the state may be donated to the next step as soon as this returns.

    The position of `data` is that of this moment, whatever has been prefetched. `loss` is what checkpoints are compared
    by.
    """
    checkpoints.save_checkpointables_async(
        step,
        {"state": _plain(state)},
        force=True,
        metrics={"loss": loss},
        custom_metadata={"data": data.get_state()},
    )


def resume(folder: Path, like: TrainState, data: grain.DatasetIterator) -> tuple[TrainState, int]:
    """The latest checkpoint that can be read, and its step; `like` and 0 if there is none at all.

    The state has the shapes, dtypes and shardings of `like`, and `data` is moved to its position. Later checkpoints,
    which could not be read, are named and moved to the folder `unreadable_checkpoints` beside this one.

    Raises:
        UserError: there are checkpoints, and none can be read. They stay where they are.
    """
    steps = sorted((int(path.name) for path in folder.glob("*") if path.name.isdigit()), reverse=True)
    for place, step in enumerate(steps):
        loaded, reason = _try(folder.absolute() / str(step), like)
        if not all_hold(loaded is not None):
            print(f"checkpoint {folder / str(step)} cannot be read ({reason or 'by another process'})", flush=True)
            continue
        assert loaded is not None
        state, position = loaded
        data.set_state(position)
        wait_for_all("read")  # before anything is moved
        if is_first():
            for bad in steps[:place]:
                _move_aside(folder, bad)
        wait_for_all("moved")
        return state, step
    if steps:
        raise UserError(
            f"{folder}: none of its {len(steps)} checkpoints can be read; move the folder away to start anew"
        )
    return like, 0


def _try(path: Path, like: TrainState) -> tuple[tuple[TrainState, Any] | None, str]:
    """State and data position, or None and why not."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _plain(like))
    try:
        position = ocp.checkpointables_metadata(path).custom_metadata["data"]
        state = ocp.load_checkpointables(path, {"state": abstract})["state"]
    except Exception as error:  # Orbax and its storage raise about anything for a damaged file, Exception included
        return None, " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return (TrainState(state["step"], state["weights"], state["optimizer"]), position), ""


def _move_aside(folder: Path, step: int) -> None:
    target = folder.parent / _ASIDE
    target.mkdir(exist_ok=True)
    name = f"{step}"
    while (target / name).exists():
        name += "_"
    os.replace(folder / str(step), target / name)
    print(f"moved it to {target / name}", flush=True)


def _plain(state: TrainState) -> dict[str, Any]:
    # Names of this file, not attributes of a class, are what stands on disk.
    return {"step": state.step, "weights": state.weights, "optimizer": state.optimizer}
