"""The policies at the budgets that were asked for, each with the generator that runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpop_jax import policies
from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.inference import Generator
from kvpop_jax.models import LoadedModel
from kvpop_jax.policies import PolicySettings, compose
from kvpop_jax.training.export import LoadedScorer

DEFAULT_SINKS, DEFAULT_WINDOW = 4, 32  # of an evaluation without a scorer, whose own sizes would count


@dataclass(frozen=True, eq=False)
class Contestant:
    """One policy at one budget.

    Attributes:
        policy: Its name.
        budget: Entries per KV head; None for dense.
        generator: Runs the model under it.
        sinks, window: What its policy was made with.
        scorer_fingerprint: Identifies the scorer's weights; None for policies without one.
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


def contestants_of(model: LoadedModel, settings: EvalSettings, scorers: Mapping[str, LoadedScorer]) -> list[Contestant]:
    """Every policy of the settings at every budget, dense once, in the order of the settings.

    Raises:
        UserError: A policy is unknown or lacks its scorer, a budget leaves no pool, or sizes are not those that a
            scorer was trained with.
    """
    found = []
    for name in settings.policies:
        policies.check(name)
        made, owned = [], []
        for part in name.split("+"):
            own, chosen = scorers.get(part), policy_settings(settings, scorers, part)
            made.append(policies.make(part, chosen))
            owned.append(own)
            if own is not None:
                _check_trained_with(part, own, chosen, settings.budgets)
        policy = made[0] if len(made) == 1 else compose(made[0], made[1])
        fingerprint = "+".join(own.fingerprint for own in owned if own is not None) or None
        for budget in (None,) if name == "dense" else settings.budgets:
            pin_prompt = settings.pin_prompt and budget is not None
            generator = Generator(model, policy, budget, scorers=_params(owned, model), pin_prompt=pin_prompt)
            found.append(Contestant(name, budget, generator, chosen.sinks, chosen.window, fingerprint))
    return found


def policy_settings(settings: EvalSettings, scorers: Mapping[str, LoadedScorer], name: str) -> PolicySettings:
    """What the policy is made from: sinks and window as asked for, else its scorer's, else any scorer's.

    All policies of an evaluation share them, so that equal budgets are also split alike.
    """
    own = scorers.get(name)
    trained = own or next(iter(scorers.values()), None)
    sinks, window = (trained.sinks, trained.window) if trained else (DEFAULT_SINKS, DEFAULT_WINDOW)
    return PolicySettings(
        sinks=sinks if settings.sinks is None else settings.sinks,
        window=window if settings.window is None else settings.window,
        scorer=None if own is None else own.scorer,
    )


def dense_contestant(model: LoadedModel) -> Contestant:
    """The full cache, as a reference where it is not itself a contestant."""
    (contestant,) = contestants_of(model, EvalSettings(policies=("dense",)), {})
    return contestant


def _params(owned: Sequence[LoadedScorer | None], model: LoadedModel) -> list[Any] | None:
    """Parameters of every layer's policy; of a policy made of two, their pairs."""
    if not any(owned):
        return None
    none = [None] * model.config.num_layers
    of_parts = [none if own is None else own.params for own in owned]
    return list(of_parts[0]) if len(of_parts) == 1 else list(zip(*of_parts, strict=True))


def _check_trained_with(name: str, scorer: LoadedScorer, chosen: PolicySettings, budgets: tuple[int, ...]) -> None:
    for size in ("sinks", "window"):
        asked, trained = getattr(chosen, size), getattr(scorer, size)
        if asked != trained:
            raise UserError(f"{size} is {asked}; the scorer of {name} was trained with {trained}")
    for budget in budgets:
        if budget not in scorer.budgets:
            known = ", ".join(map(str, scorer.budgets))
            raise UserError(f"budgets names {budget}; the scorer of {name} was trained for {known}")
