"""The plan file: which policy and how many entries every layer gets, why, and for which model."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from kvpop_jax import policies
from kvpop_jax.errors import UserError
from kvpop_jax.models import LoadedModel

FORMAT_VERSION = 1
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class LayerChoice:
    """One layer's share of a plan.

    Attributes:
        prefill: the policy that cuts the prompt; "dense" keeps all of it until the first step.
        decode: the policy that steps.
        budget: entries per KV head.
        prefill_budget: entries per KV head that the prompt is cut to; None for `budget`.
    """

    prefill: str
    decode: str
    budget: int
    prefill_budget: int | None = None

    @property
    def policy(self) -> str:
        """The name of the policy that does both."""
        return self.prefill if self.prefill == self.decode else f"{self.prefill}+{self.decode}"


@dataclass(frozen=True)
class Plan:
    """A strategy for one model at one average budget.

    Attributes:
        name: of the file without its ending; the strategy's name among the policies of a report.
        model: source and fingerprint of the model it was made for.
        data: what it was calibrated on: where from, how much, and a hash of the tokens.
        chosen_by: signal that chose the policies of each phase, and the budgets.
        budget: entries per KV head, averaged over layers; the sum over layers is exactly budget * layers.
        sinks, window: of all policies.
        layers: one choice per layer.
        signals: every measured value by signal, phase, policy and layer.
        fingerprint: of the file it was read from; empty for a plan that was not.
    """

    name: str
    model: Mapping[str, str]
    data: Mapping[str, Any]
    chosen_by: Mapping[str, str]
    budget: int
    sinks: int
    window: int
    layers: tuple[LayerChoice, ...]
    signals: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""

    def check_model(self, model: LoadedModel) -> None:
        """Refuses another model than the plan was made for.

        Raises:
            UserError: naming both.
        """
        if self.model["fingerprint"] != model.fingerprint:
            raise UserError(
                f"plan {self.name} was made for {self.model['source']} ({self.model['fingerprint'][:12]}), "
                f"not for {model.source} ({model.fingerprint[:12]})"
            )
        if len(self.layers) != model.config.num_layers:
            raise UserError(f"plan {self.name} has {len(self.layers)} layers; the model has {model.config.num_layers}")


def write_plan(path: Path, plan: Plan) -> None:
    """Writes the plan as YAML, runs of equal layers as one entry."""
    content = {
        "format_version": FORMAT_VERSION,
        "model": dict(plan.model),
        "data": dict(plan.data),
        "chosen_by": dict(plan.chosen_by),
        "budget": plan.budget,
        "sinks": plan.sinks,
        "window": plan.window,
        "layers": list(_ranges(plan.layers)),
        "signals": plan.signals,
    }
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=120)
    scratch = path.with_name(path.name + ".partial")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def read_plan(path: str | Path) -> Plan:
    """Reads and checks a plan.

    Raises:
        UserError: no such file, not a plan, a layer missing or named twice, an unknown policy, or a total that is not
            the budget times the layers.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
        content = yaml.safe_load(raw)
    except OSError:
        raise UserError(f"plan: no file {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or content.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path}: not a plan of format_version {FORMAT_VERSION}, as calibrate.py writes")
    try:
        plan = Plan(
            name=path.stem,
            model={key: str(content["model"][key]) for key in ("source", "fingerprint")},
            data=content.get("data", {}),
            chosen_by=content.get("chosen_by", {}),
            budget=int(content["budget"]),
            sinks=int(content["sinks"]),
            window=int(content["window"]),
            layers=_layers(path, content["layers"]),
            signals=content.get("signals", {}),
            fingerprint=hashlib.sha256(raw).hexdigest(),
        )
    except KeyError as error:
        raise UserError(f"{path}: the field {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    total = sum(layer.budget for layer in plan.layers)
    if total != plan.budget * len(plan.layers):
        raise UserError(
            f"{path}: the budgets of {len(plan.layers)} layers add up to {total}, not to {plan.budget} each on average "
            f"({plan.budget * len(plan.layers)})"
        )
    return plan


def _layers(path: Path, entries: Sequence[Mapping[str, Any]]) -> tuple[LayerChoice, ...]:
    found: dict[int, LayerChoice] = {}
    for entry in entries:
        prefill_budget = entry.get("prefill_budget")
        choice = LayerChoice(
            str(entry["prefill"]),
            str(entry["decode"]),
            int(entry["budget"]),
            None if prefill_budget is None else int(prefill_budget),
        )
        for phase in PHASES:
            if getattr(choice, phase) not in policies.names():
                raise UserError(
                    f"{path}: layers {entry['layers']}: unknown {phase} policy {getattr(choice, phase)!r}; "
                    f"the policies are {', '.join(policies.names())}"
                )
        first, _, last = str(entry["layers"]).partition("-")
        for layer in range(int(first), int(last or first) + 1):
            if layer in found:
                raise UserError(f"{path}: layer {layer} is given twice")
            found[layer] = choice
    missing = set(range(max(found, default=-1) + 1)) - set(found)
    if missing or not found:
        raise UserError(f"{path}: layer {min(missing, default=0)} is missing")
    return tuple(found[layer] for layer in range(len(found)))


def _ranges(layers: Sequence[LayerChoice]) -> Sequence["_Line"]:
    ranges = []
    for choice, run in groupby(enumerate(layers), key=lambda pair: pair[1]):
        numbers = [number for number, _ in run]
        span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        entry = {key: value for key, value in asdict(choice).items() if value is not None}
        ranges.append(_Line(layers=span, **entry))
    return ranges


class _Dumper(yaml.SafeDumper):
    """Lists of numbers, and the layer ranges, on one line each."""


class _Line(dict[str, Any]):
    """A mapping that is written on one line."""


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    flat = all(isinstance(value, int | float) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flat)


def _represent_line(dumper: yaml.SafeDumper, values: _Line) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", values.items(), flow_style=True)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(_Line, _represent_line)
