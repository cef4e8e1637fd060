"""A trained scorer as files, tied to the model it was trained for: scorer.safetensors beside scorer.json."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from kvpop_jax.errors import UserError
from kvpop_jax.models import LoadedModel
from kvpop_jax.scorers.base import Scorer, ScorerDims, dims_of
from kvpop_jax.scorers.mlp import MLPSettings, mlp_scorer
from kvpop_jax.scorers.mlstm import MLSTMSettings, mlstm_scorer

FORMAT_VERSION = 1
ScorerSettings = MLSTMSettings | MLPSettings
_KINDS: dict[str, tuple[type[ScorerSettings], Callable[[Any, ScorerDims], Scorer]]] = {
    "mlstm": (MLSTMSettings, mlstm_scorer),
    "mlp": (MLPSettings, mlp_scorer),
}
_WEIGHTS, _DESCRIPTION = "scorer.safetensors", "scorer.json"


@dataclass(frozen=True, eq=False)
class LoadedScorer:
    """A scorer ready to be used by its policy.

    Attributes:
        policy: name of the policy it was trained under.
        scorer: its functions.
        params: its weights, one tree per layer.
        sinks, window, budgets, pin_prompt: what it was trained with.
        fingerprint: SHA-256 of its weights file.
    """

    policy: str
    scorer: Scorer
    params: list[Any]
    sinks: int
    window: int
    budgets: tuple[int, ...]
    pin_prompt: bool
    fingerprint: str

    def check_sizes(self, *, sinks: int, window: int, budgets: Sequence[int]) -> None:
        """Refuses sizes that it was not trained with.

        Raises:
            UserError: naming the first that differs.
        """
        check_sizes(self.policy, self, sinks=sinks, window=window, budgets=budgets)


class Sizes(Protocol):
    """Anything that knows the sizes a scorer is trained with."""

    @property
    def sinks(self) -> int: ...

    @property
    def window(self) -> int: ...

    @property
    def budgets(self) -> tuple[int, ...]: ...


def check_sizes(policy: str, trained: Sizes, *, sinks: int, window: int, budgets: Sequence[int]) -> None:
    """Refuses sizes other than those that the scorer of that policy is trained with.

    Raises:
        UserError: naming the first that differs.
    """
    for size, asked in (("sinks", sinks), ("window", window)):
        if asked != getattr(trained, size):
            raise UserError(f"{size} is {asked}; the scorer of {policy} was trained with {getattr(trained, size)}")
    for budget in budgets:
        if budget not in trained.budgets:
            known = ", ".join(map(str, trained.budgets))
            raise UserError(f"a budget of {budget} was asked for; the scorer of {policy} was trained for {known}")


def make_scorer(settings: ScorerSettings, dims: ScorerDims) -> Scorer:
    """The scorer that the settings describe, for a model of those sizes."""
    return next(make for of_type, make in _KINDS.values() if isinstance(settings, of_type))(settings, dims)


def save_scorer(
    folder: Path,
    model: LoadedModel,
    scorer: Scorer,
    settings: ScorerSettings,
    params: Sequence[Any],
    *,
    policy: str,
    sinks: int,
    window: int,
    budgets: dict[int, int],
    pin_prompt: bool,
) -> None:
    """Writes a scorer into an existing folder.

    Args:
        folder: where to.
        model: the base model; its fingerprint is recorded.
        scorer, settings: the scorer's functions, and what they were made from.
        params: its weights, one tree per layer.
        policy: the policy it was trained under, with these `sinks`, `window` and `pin_prompt`.
        budgets: pool size by budget, in entries per KV head.
    """
    tensors = {name: np.asarray(leaf, np.float32) for name, leaf in _named(params)}
    save_file(tensors, folder / _WEIGHTS)
    config = model.config
    description = {
        "format_version": FORMAT_VERSION,
        "policy": policy,
        "base": {"source": model.source, "fingerprint": model.fingerprint, "num_layers": config.num_layers}
        | asdict(dims_of(config)),
        "sinks": sinks,
        "window": window,
        "budgets": list(budgets),
        "pools": list(budgets.values()),
        "pin_prompt": pin_prompt,
        "lambda": [np.asarray(scorer.decay(layer), np.float64).round(9).tolist() for layer in params],
        "scorer": {"kind": scorer.kind, "settings": asdict(settings)},
    }
    (folder / _DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def load_scorer(
    folder: str | Path,
    model: LoadedModel,
    *,
    sinks: int | None = None,
    window: int | None = None,
    budgets: Sequence[int] = (),
) -> LoadedScorer:
    """Reads a scorer for use with `model`.

    Args:
        folder: what training exported.
        model: the model it is to be used with.
        sinks, window, budgets: the sizes it is to be used with; left out, they are not checked.

    Raises:
        UserError: not a scorer, of another format, for another model, or trained with other sizes; says which.
    """
    folder = Path(folder)
    description = _read_description(folder / _DESCRIPTION)
    base = description["base"]
    if base["fingerprint"] != model.fingerprint:
        raise UserError(
            f"{folder}: this scorer belongs to {base['source']} ({base['fingerprint'][:12]}), "
            f"not to {model.source} ({model.fingerprint[:12]})"
        )
    trained = tuple(description["budgets"])
    _check_size(folder, "sinks", sinks, description["sinks"])
    _check_size(folder, "window", window, description["window"])
    for budget in budgets:
        if budget not in trained:
            raise UserError(
                f"{folder}: this scorer was trained for budgets {', '.join(map(str, trained))}, not {budget}"
            )
    scorer = make_scorer(_read_settings(description["scorer"]), dims_of(model.config))
    weights = folder / _WEIGHTS
    return LoadedScorer(
        policy=description["policy"],
        scorer=scorer,
        params=_read_params(weights, scorer, model.config.num_layers),
        sinks=description["sinks"],
        window=description["window"],
        budgets=trained,
        pin_prompt=description["pin_prompt"],
        fingerprint=hashlib.sha256(weights.read_bytes()).hexdigest(),
    )


def _check_size(folder: Path, name: str, asked: int | None, trained: int) -> None:
    if asked is not None and asked != trained:
        raise UserError(f"{folder}: this scorer was trained with {name} {trained}, not {asked}")


def _read_description(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; a scorer is a folder that training exported") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    version = description.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format_version is {version}; this version of KVpop-JAX reads {FORMAT_VERSION}")
    return description


def _read_settings(described: dict[str, Any]) -> ScorerSettings:
    settings_type, _ = _KINDS[described["kind"]]
    # JSON has no tuples.
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in described["settings"].items()}
    return settings_type(**values)


def _read_params(path: Path, scorer: Scorer, layers: int) -> list[Any]:
    try:
        tensors = load_file(path)
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(f"{path}: missing or not a complete safetensors file") from error
    template = jax.eval_shape(lambda: [scorer.init(jax.random.key(0))] * layers)
    names = [name for name, _ in _named(template)]
    if set(names) != set(tensors):
        odd = sorted(set(names) ^ set(tensors))
        raise UserError(f"{path}: does not hold the weights that {_DESCRIPTION} describes, {odd[0]} for one")
    leaves = []
    for name, leaf in _named(template):
        if tensors[name].shape != leaf.shape:
            raise UserError(f"{path}: {name} has shape {tensors[name].shape}; the model needs {leaf.shape}")
        leaves.append(jnp.asarray(tensors[name], leaf.dtype))
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _named(params: Any) -> list[tuple[str, Any]]:
    """Leaves under names like `layers.3.query_KX`."""
    paths = jax.tree_util.tree_leaves_with_path(list(params))
    return [("layers." + jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in paths]
