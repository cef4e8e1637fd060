"""From signals to a strategy: the best policy of every layer and phase, then the budgets (PolyKV Algorithm 1)."""

from collections.abc import Mapping, Sequence

from kvpop_jax.cache import entry_bytes
from kvpop_jax.errors import UserError
from kvpop_jax.models import LoadedModel
from kvpop_jax.policies import Policy, compose
from kvpop_jax.polykv.allocation import allocate
from kvpop_jax.polykv.measure import Candidate, Signals
from kvpop_jax.polykv.plan import LayerChoice
from kvpop_jax.polykv.settings import CalibrateSettings


def choose(
    settings: CalibrateSettings,
    model: LoadedModel,
    candidates: Mapping[str, Mapping[str, Candidate]],
    signals: Signals,
    *,
    sinks: int,
    window: int,
) -> tuple[LayerChoice, ...]:
    """The strategy that the signals name.

    A learned policy keeps the budget that its scorer was trained for; the other layers share what is left.

    Raises:
        UserError: a signal that was not measured, or a budget that some layer's policies cannot work with.
    """
    prefill = best(signals, "prefill", settings.prefill, settings.prefill_signal)
    decode = best(signals, "decode", settings.decode, settings.decode_signal)
    pairs = list(zip(prefill, decode, strict=True))
    made = [_pair(candidates["prefill"][a].policy, candidates["decode"][b].policy) for a, b in pairs]
    budgets = _budgets(settings, model, candidates, signals, pairs, made, sinks=sinks, window=window)
    return tuple(LayerChoice(a, b, budget) for (a, b), budget in zip(pairs, budgets, strict=True))


def best(signals: Signals, phase: str, names: Sequence[str], signal: str) -> list[str]:
    """The best of the named policies in every layer; of equals the one named first."""
    measured = signals.cosine if signal == "cosine" else signals.ppl
    for name in names:
        if len(names) > 1 and name not in measured.get(phase, {}):
            raise UserError(f"{phase}_signal: {signal} of {name} was not measured")
    if len(names) == 1:
        return [names[0]] * len(signals.entropy)
    sign = 1.0 if signal == "cosine" else -1.0
    layers = range(len(signals.entropy))
    return [max(names, key=lambda name: sign * measured[phase][name][layer]) for layer in layers]


def _pair(prefill: Policy, decode: Policy) -> Policy:
    return decode if prefill.name == decode.name else compose(prefill, decode)


def _budgets(
    settings: CalibrateSettings,
    model: LoadedModel,
    candidates: Mapping[str, Mapping[str, Candidate]],
    signals: Signals,
    pairs: Sequence[tuple[str, str]],
    made: Sequence[Policy],
    *,
    sinks: int,
    window: int,
) -> list[int]:
    N, budget = len(pairs), settings.budget
    size = entry_bytes(model.config.head_dim, model.dtype)
    for policy in set(made):
        policy.plan(budget, model.config, size)  # Refuses a budget that leaves it no pool.
    if settings.budget_signal == "uniform":
        return [budget] * N
    if settings.budget_signal == "ppl" and not signals.ppl:
        raise UserError("budgets: perplexities were not measured; choose entropy or uniform")
    score_N = signals.entropy if settings.budget_signal == "entropy" else signals.worst_ppl()
    least = settings.least or max(sinks + window + 1, budget // 4)
    learned = [any(candidates[p][n].params for p, n in zip(("prefill", "decode"), pair, strict=True)) for pair in pairs]
    free = [layer for layer in range(N) if not learned[layer]]
    if not free:
        return [budget] * N
    shared = allocate(
        [score_N[layer] for layer in free],
        budget * len(free),
        [_least(made[layer], least, budget, model, size) for layer in free],
        settings.prompt_tokens + settings.continuation_tokens,
    )
    by_layer = dict(zip(free, shared, strict=True))
    return [by_layer.get(layer, budget) for layer in range(N)]


def _least(policy: Policy, least: int, budget: int, model: LoadedModel, size: int) -> int:
    """The smallest budget from `least` on that leaves the policy a pool; `budget` itself does."""
    for entries in range(least, budget):
        try:
            policy.plan(entries, model.config, size)
        except UserError:
            continue
        return entries
    return budget
