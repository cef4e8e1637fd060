"""Several processes as one run: how they find each other, and the few things that they must agree on.

Every process runs the same program on the same configuration, with the devices of its own host. Alone, all of this does
nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from kvpop_jax.errors import UserError


@dataclass(frozen=True)
class ProcessSettings:
    """How the processes of a run find each other; by default there is only one.

    Attributes:
        detect: Read the others from the environment: a TPU slice (or several), Slurm, Kubernetes (JobSet) or MPI.
        coordinator: Without detection: address and port of the first process, "10.0.0.1:8476"; the same for all.
        count: Number of processes.
        index: Number of this process, from 0.
    """

    detect: bool = False
    coordinator: str | None = None
    count: int | None = None
    index: int | None = None

    def __post_init__(self) -> None:
        given = [value is not None for value in (self.coordinator, self.count, self.index)]
        if any(given) and not all(given):
            raise UserError("processes.coordinator, processes.count and processes.index are given together or not")
        if self.detect and any(given):
            raise UserError(
                "processes.detect reads coordinator, count and index from the environment; give one or both"
            )
        if self.count is not None and self.index is not None and not 0 <= self.index < self.count:
            raise UserError(
                f"processes.index is {self.index}; it must be from 0 to processes.count - 1 = {self.count - 1}"
            )


def join(settings: ProcessSettings) -> None:
    """Waits for the others, before anything touches a device.

    Raises:
        UserError: an environment without other processes, or a coordinator that cannot be reached.
    """
    if not settings.detect and settings.coordinator is None:
        return
    # Its handler would swallow a SIGTERM that comes before training has set its own.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(settings.coordinator, settings.count, settings.index)
    except (ValueError, RuntimeError) as error:
        wanted = f"{settings.coordinator} did not answer" if settings.coordinator else "nothing was detected"
        raise UserError(f"processes: {wanted} ({' '.join(str(error).split())[:200]})") from error
    local, total = jax.local_device_count(), jax.device_count()
    print(f"process {jax.process_index()} of {jax.process_count()}: {local} of {total} devices", flush=True)


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def all_hold(holds: bool) -> bool:
    """Whether it holds in every process."""
    return holds if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.int32(holds)).all())


def from_first(compute: Callable[[], bytes], size: int) -> bytes:
    """What the first process computes, `size` bytes, in all of them."""
    if jax.process_count() == 1:
        return compute()
    own = np.frombuffer(compute(), np.uint8) if is_first() else np.zeros(size, np.uint8)
    return multihost_utils.broadcast_one_to_all(own).astype(np.uint8).tobytes()
