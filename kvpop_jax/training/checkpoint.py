"""Resuming: weights, optimizer, step and data position in one atomic checkpoint (Orbax)."""

from pathlib import Path
from typing import Any

import grain
import jax
from orbax.checkpoint import v1 as ocp

from kvpop_jax.config import CheckpointConfig
from kvpop_jax.training.step import TrainState


def open_checkpoints(folder: Path, settings: CheckpointConfig) -> ocp.training.Checkpointer:
    """The checkpoints of a run, to be used as a context: leaving it waits for what is still being written.

    A checkpoint appears under its final name only when it is complete; beyond `settings.keep` the oldest are deleted.
    """
    return ocp.training.Checkpointer(
        folder.absolute(),
        preservation_policy=ocp.training.preservation_policies.LatestN(settings.keep),
        cleanup_tmp_directories=True,
    )


def latest_step(checkpoints: ocp.training.Checkpointer) -> int:
    """Steps done at the latest checkpoint, 0 if there is none."""
    return 0 if checkpoints.latest is None else checkpoints.latest.step


def save(checkpoints: ocp.training.Checkpointer, state: TrainState, data: grain.DatasetIterator) -> None:
    """Starts writing a checkpoint; the state may be donated to the next step as soon as this returns.

    The position of `data` is that of this moment, whatever has been prefetched.
    """
    checkpoints.save_checkpointables_async(int(state.step), {"state": _plain(state), "data": data}, force=True)


def restore(checkpoints: ocp.training.Checkpointer, like: TrainState, data: grain.DatasetIterator) -> TrainState:
    """The latest checkpoint, with the shapes, dtypes and shardings of `like`; `data` is moved to its position."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _plain(like))
    loaded = checkpoints.load_checkpointables(None, {"state": abstract, "data": data})["state"]
    return TrainState(loaded["step"], loaded["weights"], loaded["optimizer"])


def _plain(state: TrainState) -> dict[str, Any]:
    # Names of this file, not attributes of a class, are what stands on disk.
    return {"step": state.step, "weights": state.weights, "optimizer": state.optimizer}
