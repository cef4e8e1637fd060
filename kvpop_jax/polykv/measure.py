"""The signals of a calibration: every candidate in every layer and phase, on a set of texts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kvpop_jax import policies
from kvpop_jax.cache import entry_bytes
from kvpop_jax.models import LoadedModel
from kvpop_jax.policies import Policy, PolicySettings, compose
from kvpop_jax.polykv.plan import PHASES
from kvpop_jax.polykv.signals import make_replay, read_reference
from kvpop_jax.training.scan import stack_layers


@dataclass(frozen=True, eq=False)
class Candidate:
    """A policy that a layer may run.

    Attributes:
        policy: its functions.
        params: its parameters, one per layer; None where it has none.
    """

    policy: Policy
    params: Sequence[Any] | None

    def of_layer(self, layer: int) -> Any:
        """Its parameters in one layer."""
        return None if self.params is None else self.params[layer]


@dataclass(frozen=True)
class Signals:
    """What was measured, one value per layer in every list.

    Attributes:
        entropy: of the attention that positions receive, in nats: more spread means a larger need.
        cosine: phase -> policy -> cosine of the attention block's output with the full cache's; 1 is no change.
        ppl: phase -> policy -> perplexity of the continuation minus that of full caches.
        full_ppl: perplexity with full caches.
    """

    entropy: list[float]
    cosine: dict[str, dict[str, list[float]]]
    ppl: dict[str, dict[str, list[float]]]
    full_ppl: float

    def worst_ppl(self) -> list[float]:
        """Per layer the largest rise of perplexity over all policies and phases, at least 0."""
        every = [values for phase in self.ppl.values() for values in phase.values()]
        return [max(0.0, *column) for column in zip(*every, strict=True)]


def measure(
    model: LoadedModel,
    candidates: Mapping[str, Mapping[str, Candidate]],
    token_MT: np.ndarray,
    *,
    prompt: int,
    budget: int,
    batch_size: int,
    seed: int,
    perplexity: bool,
) -> Signals:
    """Measures all signals with one full-cache pass per text.

    Full caches change nothing, so a dense candidate is given its values and not run.

    Args:
        model: the model.
        candidates: phase -> name -> policy.
        token_MT: the texts, all of one length.
        prompt: tokens of each that are the prompt.
        budget: entries per KV head of the layer that is tried.
        batch_size: texts at a time.
        seed: of random policies.
        perplexity: measure perplexities too.
    """
    config, N = model.config, model.config.num_layers
    stacked = stack_layers(model.params)
    read = partial(read_reference, config, stacked, prompt=prompt)
    texts, length = token_MT.shape
    batches = [token_MT[start : start + batch_size] for start in range(0, texts, batch_size)]
    tried = [
        (phase, name, candidate) for phase in PHASES for name, candidate in candidates[phase].items() if name != "dense"
    ]
    replays = {
        (phase, name): _replay(model, phase, candidate, prompt, length, budget, perplexity)
        for phase, name, candidate in tried
    }
    cosine = {(phase, name): np.zeros(N) for phase, name, _ in tried}
    nll = {(phase, name): np.zeros(N) for phase, name, _ in tried}
    full_nll, attended_NT = 0.0, np.zeros((N, length))
    with tqdm(total=len(batches) * len(tried) * N, desc="calibrating", unit="replay") as bar:
        for number, batch in enumerate(batches):
            reference = jax.block_until_ready(read(jnp.asarray(batch, jnp.int32)))
            share = len(batch) / texts
            full_nll += share * float(reference.nll_BC.mean())
            attended_NT += share * np.asarray(reference.attended_NT, np.float64)
            seed_B = jnp.asarray((seed + number * batch_size + np.arange(len(batch))) % 2**31, jnp.int32)
            for phase, name, candidate in tried:
                bar.set_postfix_str(f"{phase} {name}")
                for layer in range(N):
                    run = replays[phase, name]
                    own = candidate.of_layer(layer)
                    pair = {"prefill": (own, None), "decode": (None, own)}[phase] if own is not None else None
                    cosine_BC, nll_BC = run(stacked, pair, reference, jnp.int32(layer), seed_B)
                    cosine[phase, name][layer] += share * float(cosine_BC.mean())
                    nll[phase, name][layer] += share * float(nll_BC.mean())
                    bar.update()
    full = math.exp(full_nll)
    rise = {key: np.exp(values) - full for key, values in nll.items()}
    return Signals(
        entropy=_plain(_entropy(attended_NT)),
        cosine=_by_phase(candidates, cosine, 1.0, N),
        ppl=_by_phase(candidates, rise, 0.0, N) if perplexity else {},
        full_ppl=full,
    )


def alone(policy: Policy, dense: Policy, phase: str, budget: int) -> Policy:
    """The policy in one phase, with a full cache in the other."""
    return compose(policy, dense, prefill_budget=budget) if phase == "prefill" else compose(dense, policy)


def _replay(
    model: LoadedModel, phase: str, candidate: Candidate, prompt: int, length: int, budget: int, perplexity: bool
) -> Any:
    dense = policies.make("dense", PolicySettings())
    policy = alone(candidate.policy, dense, phase, budget)
    size = entry_bytes(model.config.head_dim, model.dtype)
    plan = policy.plan(length if phase == "prefill" else budget, model.config, size)
    changes = phase == "prefill" and candidate.policy.prefill_mode == "expiry"
    return make_replay(model.config, policy, plan, prompt=prompt, prompt_changes=changes, perplexity=perplexity)


def _entropy(attended_NT: np.ndarray) -> np.ndarray:
    share_NT = attended_NT / attended_NT.sum(axis=1, keepdims=True)
    return -np.sum(share_NT * np.log(np.maximum(share_NT, 1e-300)), axis=1)


def _by_phase(
    candidates: Mapping[str, Mapping[str, Candidate]],
    measured: Mapping[tuple[str, str], np.ndarray],
    of_dense: float,
    layers: int,
) -> dict[str, dict[str, list[float]]]:
    return {
        phase: {name: _plain(measured.get((phase, name), np.full(layers, of_dense))) for name in candidates[phase]}
        for phase in PHASES
    }


def _plain(values: np.ndarray) -> list[float]:
    """As the plan file holds them: six significant digits."""
    return [float(f"{value:.6g}") for value in values]
