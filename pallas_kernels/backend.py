"""How an operation picks the form that runs it: an explicit back end is honoured or refused, never replaced."""

from collections.abc import Callable, Mapping


class BackendError(ValueError):
    """The back end asked for does not exist for this operation, or refuses these arguments."""


def select_backend(op: str, backend: str, available: Mapping[str, Callable]) -> str:
    """Names the back end that will run `op`.

    Args:
        op: name of the operation, for the error.
        backend: "auto", or a key of `available`.
        available: the back ends of the operation on this platform, best first.

    Raises:
        BackendError: `backend` is neither "auto" nor available.
    """
    if backend == "auto":
        return next(iter(available))
    if backend not in available:
        raise BackendError(f"{op}: backend={backend!r} is not available; use 'auto' or one of {', '.join(available)}")
    return backend
