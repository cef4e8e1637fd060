"""The policies there are: every module of `kvpop_jax.policies`, and any two of them joined by a plus."""

import importlib
import pkgutil

import kvpop_jax.policies
from kvpop_jax.errors import UserError
from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.compose import compose
from kvpop_jax.policies.machinery.settings import PolicySettings


def names() -> list[str]:
    """Names of all policies that are not made of two, in alphabetical order."""
    return sorted(module.name for module in pkgutil.iter_modules(kvpop_jax.policies.__path__) if not module.ispkg)


def check(name: str) -> None:
    """Refuses a name that is neither a policy's nor two of them joined by a plus.

    Raises:
        UserError: naming those there are.
    """
    parts = name.split("+")
    if len(parts) > 2 or not set(parts) <= set(names()):
        raise UserError(
            f"unknown policy {name!r}; the policies are {', '.join(names())}, "
            "and any two of them as PREFILL+DECODE (snapkv+h2o)"
        )


def make(name: str, settings: PolicySettings) -> Policy:
    """The policy of that name; "a+b" cuts the prompt by a and steps by b (`compose`).

    Raises:
        UserError: there is none, or the settings lack what it needs.
    """
    check(name)
    parts = [importlib.import_module(f"kvpop_jax.policies.{part}").make(settings) for part in name.split("+")]
    return parts[0] if len(parts) == 1 else compose(parts[0], parts[1])
