"""The policies at the budgets that were asked for, each with the generator that runs it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpop_jax import policies
from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.inference import Generator
from kvpop_jax.models import LoadedModel
from kvpop_jax.policies import Policy, PolicySettings, compose
from kvpop_jax.polykv.plan import Plan, read_plan
from kvpop_jax.scorers.files import LoadedScorer

DEFAULT_SINKS, DEFAULT_WINDOW = 4, 32  # of an evaluation without a scorer, whose own sizes would count


@dataclass(frozen=True, eq=False)
class Contestant:
    """One policy at one budget.

    Attributes:
        policy: Its name, or the plan's.
        budget: Entries per KV head, averaged over layers; None for dense.
        generator: Runs the model under it.
        sinks, window: What its policy was made with.
        scorer_fingerprint: Identifies the scorers' weights, and the plan; None for policies without either.
    """

    policy: str
    budget: int | None
    generator: Generator
    sinks: int
    window: int
    scorer_fingerprint: str | None

    @property
    def name(self) -> str:
        """Policy and budget, for people."""
        return self.policy if self.budget is None else f"{self.policy} {self.budget}"

    def check_prompt(self, length: int, where: str) -> None:
        """Refuses a prompt that pinning leaves no pool for; `where` names the task."""
        if self.budget is None or not self.generator.pin_prompt:
            return
        try:
            self.generator.check_prompt(length)
        except UserError as error:
            raise UserError(f"{where}, {self.name}: {error}") from error


def check_policies(settings: EvalSettings, scored: Collection[str]) -> None:
    """Refuses policies and plans that can be seen to be wrong without a model; those in `scored` have a scorer.

    Raises:
        UserError: A policy is unknown or lacks its scorer, or a plan cannot be read.
    """
    for name in settings.policies:
        policies.check(name)
        if unscored := [part for part in name.split("+") if part not in scored]:
            policies.make("+".join(unscored), policy_settings(settings, {}, name))
    for path in settings.plan:
        read_plan(path)


def contestants_of(model: LoadedModel, settings: EvalSettings, scorers: Mapping[str, LoadedScorer]) -> list[Contestant]:
    """Every policy of the settings at every budget, dense once, then every plan, in the order of the settings.

    Raises:
        UserError: A policy is unknown or lacks its scorer, a budget leaves no pool, sizes are not those that a scorer
            was trained with, or a plan is for another model.
    """
    found = []
    for name in settings.policies:
        policies.check(name)
        chosen = policy_settings(settings, scorers, name)
        made = _make(name, chosen, scorers, settings.budgets)
        for budget in (None,) if name == "dense" else settings.budgets:
            pin_prompt = settings.pin_prompt and budget is not None
            own = _layers(made, model)
            generator = Generator(model, made.policy, budget, own, pin_prompt, settings.cache_dtype)
            found.append(Contestant(name, budget, generator, chosen.sinks, chosen.window, made.fingerprint))
    for path in settings.plan:
        found.append(_planned(read_plan(path), model, settings, scorers))
    names = [contestant.name for contestant in found]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"plan: two contestants are called {name}; rename the plan's file")
    return found


@dataclass(frozen=True, eq=False)
class _Made:
    """A policy with its parameters, one list over layers for each of its parts, and what identifies their weights."""

    policy: Policy
    params: tuple[list[Any] | None, ...]
    fingerprint: str | None

    def of_layer(self, layer: int) -> Any:
        """Parameters in one layer: of a policy made of two, a pair."""
        if not any(self.params):
            return None
        parts = [None if part is None else part[layer] for part in self.params]
        return parts[0] if len(parts) == 1 else tuple(parts)


def _make(
    name: str,
    chosen: PolicySettings,
    scorers: Mapping[str, LoadedScorer],
    budgets: Sequence[int],
    prefill_budget: int | None = None,
) -> _Made:
    """The policy of that name, or of those two, at budgets that its scorers were trained for."""
    owned = [scorers.get(part) for part in name.split("+")]
    parts = []
    for part, own in zip(name.split("+"), owned, strict=True):
        parts.append(policies.make(part, replace(chosen, scorer=None if own is None else own.scorer)))
        if own is not None:
            own.check_sizes(sinks=chosen.sinks, window=chosen.window, budgets=budgets)
    policy = parts[0] if len(parts) == 1 else compose(parts[0], parts[1], prefill_budget)
    fingerprint = "+".join(own.fingerprint for own in owned if own is not None) or None
    return _Made(policy, tuple(None if own is None else own.params for own in owned), fingerprint)


def _layers(made: _Made, model: LoadedModel) -> list[Any] | None:
    layers = [made.of_layer(layer) for layer in range(model.config.num_layers)]
    return layers if any(own is not None for own in layers) else None


def _planned(plan: Plan, model: LoadedModel, settings: EvalSettings, scorers: Mapping[str, LoadedScorer]) -> Contestant:
    """A PolyKV plan as one contestant. Layers with the same choice share a policy."""
    plan.check_model(model)
    chosen = PolicySettings(plan.sinks, plan.window, methods=settings.methods)
    made = {}
    for layer in plan.layers:
        budgets = [layer.budget] if layer.prefill_budget is None else [layer.budget, layer.prefill_budget]
        name = layer.policy if layer.prefill_budget is None else f"{layer.prefill}+{layer.decode}"
        made[layer] = _make(name, chosen, scorers, budgets, layer.prefill_budget)
    generator = Generator(
        model,
        [made[layer].policy for layer in plan.layers],
        [layer.budget for layer in plan.layers],
        scorers=[made[layer].of_layer(number) for number, layer in enumerate(plan.layers)],
        pin_prompt=settings.pin_prompt,
        cache_dtype=settings.cache_dtype,
    )
    weights = sorted({found.fingerprint for found in made.values() if found.fingerprint is not None})
    fingerprint = "+".join([plan.fingerprint, *weights])
    return Contestant(plan.name, plan.budget, generator, plan.sinks, plan.window, fingerprint)


def policy_settings(settings: EvalSettings, scorers: Mapping[str, LoadedScorer], name: str) -> PolicySettings:
    """What the policy is made from: sinks and window as asked for, else its scorer's, else any scorer's.

    All policies of an evaluation share them, so that equal budgets are also split alike.
    """
    own = next((scorers[part] for part in name.split("+") if part in scorers), None)
    trained = own or next(iter(scorers.values()), None)
    sinks, window = (trained.sinks, trained.window) if trained else (DEFAULT_SINKS, DEFAULT_WINDOW)
    return PolicySettings(
        sinks=sinks if settings.sinks is None else settings.sinks,
        window=window if settings.window is None else settings.window,
        scorer=None if own is None else own.scorer,
        methods=settings.methods,
    )


def dense_contestant(model: LoadedModel) -> Contestant:
    """The full cache, as a reference where it is not itself a contestant."""
    (contestant,) = contestants_of(model, EvalSettings(policies=("dense",)), {})
    return contestant
