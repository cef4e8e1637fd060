"""How an operation picks the form that runs it: an explicit back end is honoured or refused, never replaced."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax


class BackendError(ValueError):
    """The back end asked for does not exist for this operation, or refuses these arguments."""


def _refuses_nothing(*_: Any) -> None:
    return None


def _always(*_: Any) -> bool:
    return True


@dataclass(frozen=True)
class Backend:
    """One form of an operation.

    Attributes:
        run: takes the operation's arguments, all positional.
        platform: where "auto" may pick it, "tpu" or "gpu"; None anywhere.
        refuses: the same arguments -> why it cannot take them, in one line, or None.
        pays: the same arguments -> whether "auto" may pick it, which asks only about arguments that it can take.
    """

    run: Callable[..., Any]
    platform: str | None = None
    refuses: Callable[..., str | None] = _refuses_nothing
    pays: Callable[..., bool] = _always


def select_backend(op: str, backend: str, available: Mapping[str, Backend], arguments: tuple[Any, ...]) -> str:
    """Names the back end that will run `op` on those arguments.

    "auto" is the first one made for the platform (or for any) that takes the arguments and pays. One asked for by name
    is not asked where it runs: kernels of other platforms can be interpreted, and JAX refuses what it can't lower.

    Args:
        op: name of the operation, for the error.
        backend: "auto", or a key of `available`.
        available: the back ends of the operation, best first; the last takes anything.
        arguments: what they will be called with.

    Raises:
        BackendError: `backend` is neither "auto" nor available, or refuses the arguments.
    """
    if backend == "auto":
        here = platform()
        fitting = (name for name, form in available.items() if form.platform in (None, here))
        taking = (name for name in fitting if available[name].refuses(*arguments) is None)
        return next(name for name in taking if available[name].pays(*arguments))
    if backend not in available:
        raise BackendError(f"{op}: backend={backend!r} is not available; use 'auto' or one of {', '.join(available)}")
    reason = available[backend].refuses(*arguments)
    if reason is not None:
        raise BackendError(f"{op}: backend={backend!r} {reason}; use 'auto'")
    return backend


def derivative_of(plain: Callable[..., Any], static: tuple[int, ...] = ()) -> Callable[..., Any]:
    """Decorates a kernel that has no derivative of its own with that of the plain form.

    Args:
        static: places of arguments that are no arrays, behind all others.
    """

    def decorate(kernel: Callable[..., Any]) -> Callable[..., Any]:
        run = jax.custom_jvp(kernel, nondiff_argnums=static)

        @run.defjvp
        def _(*arguments: Any) -> Any:
            *fixed, primals, tangents = arguments
            return jax.jvp(lambda *arrays: plain(*arrays, *fixed), primals, tangents)

        return run

    return decorate


def mosaic_gpu_is_missing() -> str | None:
    """Why Pallas Mosaic GPU kernels for Hopper cannot run here, in one line, or None; they can be lowered anywhere."""
    if jax.__version_info__ < (0, 11, 2):
        return f"needs JAX 0.11.2 or newer, this is {jax.__version__}"
    if jax.default_backend() == "gpu" and not jax.devices()[0].compute_capability.startswith("9."):
        return "is for Hopper GPUs (compute capability 9)"
    return None


def platform() -> str:
    """The platform that a program traced here is for: that of the mesh in use, else of JAX's default devices.

    A mesh of a described topology (`jax.experimental.topologies`) counts, so a program for a slice that is not there is
    the program that would run on it.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
