"""The Python API of generation: a model, a policy, a budget."""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Generator_
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvpop_jax.cache import CachePlan, entry_bytes
from kvpop_jax.errors import UserError
from kvpop_jax.inference import decode
from kvpop_jax.inference.decode import Setup
from kvpop_jax.inference.sampling import SamplingParams
from kvpop_jax.models import LoadedModel
from kvpop_jax.policies import Policy, uniform_budgets

STEPS_PER_DISPATCH = 32
SHORTEST_BUCKET = 64


@dataclass(frozen=True)
class CacheReport:
    """What a completion's cache cost, entries per KV head.

    Where layers differ, single numbers are the mean over layers, rounded up; the tuples hold every layer's own.

    Attributes:
        budget: entries asked for; for dense, the slots of the whole sequence.
        sinks, window, pool, state_entries, scratch: how they were spent during decoding (see `CachePlan`).
        allocated: slots that exist.
        peak_live: most slots ever occupied in any layer and head.
        bytes: of this sequence's cache over all layers, the policy's state and bookkeeping included.
        prompt_survival: share of the prompt still cached at the end, averaged over layers and heads.
        pin_prompt: whether the prompt could not be evicted.
        prefill_mode: how the prompt was evicted from.
        decode: the policy whose rule the steps followed.
        total_budget, total_allocated: entries per KV head, summed over layers.
        layer_budget, layer_allocated, layer_bytes: of every layer.
        layer_peak_live: most slots ever occupied in the fullest head of every layer.
        layer_peak_mean: most slots ever occupied in every layer, averaged over its heads. Where heads share a budget
            (Ada-KV), this is what it limits.
    """

    budget: int
    sinks: int
    window: int
    pool: int
    state_entries: int
    scratch: int
    allocated: int
    peak_live: int
    bytes: int
    prompt_survival: float
    pin_prompt: bool
    prefill_mode: str
    decode: str
    total_budget: int
    total_allocated: int
    layer_budget: tuple[int, ...]
    layer_allocated: tuple[int, ...]
    layer_bytes: tuple[int, ...]
    layer_peak_live: tuple[int, ...]
    layer_peak_mean: tuple[float, ...]


@dataclass(frozen=True)
class Completion:
    """One generated sequence; the stop token is not part of it.

    Attributes:
        tokens: token ids.
        logprobs: of each token, in nats, before temperature and truncation.
        finish_reason: "stop" or "length".
        cache: what it cost.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    cache: CacheReport


@dataclass(frozen=True, eq=False)
class Generator:
    """Runs a model under an eviction policy and a budget, the same for all layers or one for each.

    Every layer's cache has its own size; nothing is padded to the largest.

    Attributes:
        model: weights, configuration and tokenizer.
        policy: from `policies.make`, or your own; or one per layer.
        budget: entries per KV head, averaged over layers if the policy spreads it; or one number per layer; None gives
            every sequence as many as it can have tokens (the dense cache).
        scorers: parameters of the policy, one per layer; None where it has none.
        pin_prompt: never evict the prompt.

    Raises:
        UserError: policies, budgets or scorers that are not one per layer, or a budget that leaves no pool.
    """

    model: LoadedModel
    policy: Policy | Sequence[Policy]
    budget: int | Sequence[int] | None
    scorers: Sequence[Any] | None = None
    pin_prompt: bool = False
    _compiled: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        layers = self.model.config.num_layers
        for name, value in (("policy", self.policy), ("budget", self.budget), ("scorers", self.scorers)):
            if isinstance(value, Sequence) and len(value) != layers:
                raise UserError(f"{name} has {len(value)} entries; the model has {layers} layers")
        if self.budget is not None:
            self.plans(0)  # Refuses an impossible budget before any work.

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policy of every layer."""
        if isinstance(self.policy, Policy):
            return (self.policy,) * self.model.config.num_layers
        return tuple(self.policy)

    def plans(self, length: int) -> tuple[CachePlan, ...]:
        """Sizes of each layer's cache for sequences of at most `length` tokens.

        Raises:
            UserError: a budget leaves no pool.
        """
        config = self.model.config
        size = entry_bytes(config.head_dim, self.model.dtype)
        if self.budget is None:
            budgets = uniform_budgets(length, config.num_layers)
        elif isinstance(self.budget, Sequence):
            budgets = tuple(self.budget)
        else:
            spread = self.policy.layer_budgets if isinstance(self.policy, Policy) else uniform_budgets
            budgets = spread(self.budget, config.num_layers)
        return tuple(policy.plan(budget, config, size) for policy, budget in zip(self.policies, budgets, strict=True))

    def check_prompt(self, length: int) -> None:
        """Refuses to pin a prompt that would leave some layer no pool.

        Raises:
            UserError: naming both lengths.
        """
        if self.pin_prompt and self.budget is not None:
            for plan in self.plans(0):
                plan.for_prompt.check_prompt(length)
                plan.check_prompt(length)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Completes all prompts as one batch.

        Args:
            prompts: token ids; lengths may differ.
            sampling: how tokens are drawn, and how many at most.
            seeds: one per prompt; a row's completion depends on its prompt and its seed only. Default: 0, 1, ...
            progress: called after each dispatch with the number of new tokens of unfinished rows.

        Raises:
            UserError: an empty prompt, one too long for the model, one that pinning leaves no pool for, or seeds that
                are not one per prompt.
        """
        if not prompts:
            return []
        setup, token_BS, length_B = self._prepare(prompts, sampling.max_new_tokens)
        seed_B = _row_seeds(seeds, len(prompts))
        start, steps = self._programs(setup, sampling, STEPS_PER_DISPATCH)
        state = start(self.model.params, self._scorers(), token_BS, length_B, seed_B)
        tokens: list[Array] = []
        log_probs: list[Array] = []
        while len(tokens) * STEPS_PER_DISPATCH < sampling.max_new_tokens:
            unfinished = int(jnp.sum(~state.done_B))
            state, token_nB, log_prob_nB = steps(self.model.params, self._scorers(), state)
            tokens.append(token_nB)
            log_probs.append(log_prob_nB)
            if progress is not None:
                progress(unfinished * STEPS_PER_DISPATCH)
            if bool(state.done_B.all()):
                break
        token_Bn = np.concatenate([np.asarray(x) for x in tokens]).T[:, : sampling.max_new_tokens]
        log_prob_Bn = np.concatenate([np.asarray(x) for x in log_probs]).T[:, : sampling.max_new_tokens]
        reports = self._reports(setup.plans, state.caches, state.usage)
        return [
            self._completion(token_n, log_prob_n, sampling, report)
            for token_n, log_prob_n, report in zip(token_Bn, log_prob_Bn, reports, strict=True)
        ]

    def stream(self, prompt: Sequence[int], sampling: SamplingParams, seed: int = 0) -> Iterator[int]:
        """Yields one completion's tokens as they are made.

        Raises:
            UserError: as `generate`.
        """
        setup, token_BS, length_B = self._prepare([prompt], sampling.max_new_tokens)
        start, steps = self._programs(setup, sampling, 1)
        state = start(self.model.params, self._scorers(), token_BS, length_B, _row_seeds([seed], 1))
        for _ in range(sampling.max_new_tokens):
            if bool(state.done_B[0]):
                return
            yield int(state.token_B[0])
            state, _tokens, _log_probs = steps(self.model.params, self._scorers(), state)

    def teacher_forced(
        self, token_BT: Int[Array, "B T"], prompt_length: int, seeds: Sequence[int] | None = None
    ) -> Generator_[Float[Array, "B V"], None, list[CacheReport]]:
        """Reads given text through the bounded cache: the logits of tokens `prompt_length` to T - 1 in turn.

        The first `prompt_length` tokens are prefilled, the rest is fed token by token. `seeds` are as in `generate`.

        Returns:
            What each row's cache cost, as the value of the iterator (`yield from`, or `StopIteration.value`).

        Raises:
            UserError: as `generate`, or a prompt that leaves nothing to read.
        """
        text_BT = np.asarray(token_BT)
        B, T = text_BT.shape
        if not 0 < prompt_length < T:
            raise UserError(f"prompt_length is {prompt_length}; a text of {T} tokens needs one from 1 to {T - 1}")
        setup, token_BS, length_B = self._prepare(list(text_BT[:, :prompt_length]), T - prompt_length)
        prefill = self._jit("prefill", setup, lambda: jax.jit(partial(decode.prefill, setup)))
        step = self._jit("step", setup, lambda: jax.jit(partial(decode.decode_step, setup), donate_argnums=(2,)))
        seed_B = _row_seeds(seeds, B)
        logits_BV, caches = prefill(self.model.params, self._scorers(), token_BS, length_B, seed_B)
        usage = _usage(caches, length_B)
        yield logits_BV
        for t in range(prompt_length, T - 1):
            position_B = jnp.full(B, t, jnp.int32)
            logits_BV, caches = step(
                self.model.params, self._scorers(), caches, text_BT[:, t], position_B, length_B, seed_B
            )
            now = _usage(caches, length_B)
            usage = _higher(usage, now)
            yield logits_BV
        return self._reports(setup.plans, caches, usage)

    def _prepare(self, prompts, new_tokens):
        lengths = [len(prompt) for prompt in prompts]
        limit = self.model.config.max_position
        for row, length in enumerate(lengths):
            if length == 0:
                raise UserError(f"prompt {row} is empty; it needs at least one token")
            if length + new_tokens > limit:
                raise UserError(
                    f"prompt {row} has {length} tokens and max_new_tokens is {new_tokens}: "
                    f"together they pass the model's limit of {limit}"
                )
        # Prompts are padded to a power of two, so that few shapes are ever compiled.
        bucket = max(SHORTEST_BUCKET, 1 << (max(lengths) - 1).bit_length())
        steps = -(-new_tokens // STEPS_PER_DISPATCH) * STEPS_PER_DISPATCH
        self.check_prompt(max(lengths))
        plans = self.plans(bucket + steps)
        for policy, plan in zip(self.policies, plans, strict=True):
            if policy.decode == "dense" and plan.capacity < max(lengths) + new_tokens:
                raise UserError(
                    f"policy {policy.name} keeps everything: a budget of {plan.budget} cannot hold "
                    f"{max(lengths)} + {new_tokens} tokens; give it no budget"
                )
        token_BS = np.zeros((len(prompts), bucket), np.int32)
        for row, prompt in enumerate(prompts):
            token_BS[row, : len(prompt)] = prompt
        setup = Setup(self.model.config, self.policies, plans, self.pin_prompt)
        return setup, jnp.asarray(token_BS), jnp.asarray(lengths, jnp.int32)

    def _scorers(self):
        return self.scorers if self.scorers is not None else [None] * self.model.config.num_layers

    def _programs(self, setup, sampling, steps):
        start = self._jit("start", (setup, sampling), lambda: jax.jit(partial(decode.start, setup, sampling=sampling)))
        many = self._jit(
            "steps",
            (setup, sampling, steps),
            lambda: jax.jit(partial(decode.decode_steps, setup, sampling=sampling, steps=steps), donate_argnums=(2,)),
        )
        return start, many

    def _jit(self, name, statics, build):
        key = (name, statics)
        if key not in self._compiled:
            self._compiled[key] = build()
        return self._compiled[key]

    def _completion(self, token_n, log_prob_n, sampling, report):
        stops = np.isin(token_n, [*self.model.config.eos_token_ids, *sampling.stop_tokens])
        end = int(np.argmax(stops)) if stops.any() else len(token_n)
        reason = "stop" if stops.any() else "length"
        return Completion(token_n[:end].tolist(), log_prob_n[:end].tolist(), reason, report)

    def _reports(self, plans, caches, usage):
        rows = len(usage.survival_B)
        layer_bytes = tuple(sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) // rows for cache in caches)
        parts = ("budget", "sinks", "window", "pool", "state_entries", "scratch")
        shared = dict(
            {part: _mean_up([getattr(plan, part) for plan in plans]) for part in parts},
            allocated=_mean_up([plan.slots for plan in plans]),
            bytes=sum(layer_bytes),
            pin_prompt=self.pin_prompt,
            prefill_mode=_each_once(policy.prefill_mode for policy in self.policies),
            decode=_each_once(policy.decode for policy in self.policies),
            total_budget=sum(plan.budget for plan in plans),
            total_allocated=sum(plan.slots for plan in plans),
            layer_budget=tuple(plan.budget for plan in plans),
            layer_allocated=tuple(plan.slots for plan in plans),
            layer_bytes=layer_bytes,
        )
        peaks = (np.asarray(usage.peak_live_BN), np.asarray(usage.peak_mean_BN), np.asarray(usage.survival_B))
        return [
            CacheReport(
                **shared,
                peak_live=int(live_N.max()),
                prompt_survival=float(share),
                layer_peak_live=tuple(live_N.tolist()),
                layer_peak_mean=tuple(mean_N.tolist()),
            )
            for live_N, mean_N, share in zip(*peaks, strict=True)
        ]


_usage = jax.jit(decode.cache_usage)
_higher = jax.jit(decode.higher_usage)


def _mean_up(values):
    return -(-sum(values) // len(values))


def _each_once(words):
    return ", ".join(dict.fromkeys(words))


def _row_seeds(seeds, rows):
    seeds = range(rows) if seeds is None else seeds
    if len(seeds) != rows:
        raise UserError(f"{len(seeds)} seeds for {rows} prompts; give one per prompt")
    return jnp.asarray([seed % 2**31 for seed in seeds], jnp.int32)
