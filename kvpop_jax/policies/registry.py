"""The policies there are: every module of this folder that defines `make`."""

import importlib
import pkgutil

import kvpop_jax.policies
from kvpop_jax.errors import UserError
from kvpop_jax.policies.base import Policy, PolicySettings

_MACHINERY = {"base", "expiry_form", "registry"}


def names() -> list[str]:
    """Names of all policies, in alphabetical order."""
    found = (module.name for module in pkgutil.iter_modules(kvpop_jax.policies.__path__))
    return sorted(name for name in found if name not in _MACHINERY)


def make(name: str, settings: PolicySettings) -> Policy:
    """The policy of that name.

    Raises:
        UserError: there is none, or the settings lack what it needs.
    """
    if name not in names():
        raise UserError(f"unknown policy {name!r}; there are {', '.join(names())}")
    return importlib.import_module(f"kvpop_jax.policies.{name}").make(settings)
