"""The Python API of generation: a model, a policy, a budget."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Generator as Generator_
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvpop_jax.cache import CachePlan, cache_dtype_of, entry_bytes
from kvpop_jax.errors import UserError
from kvpop_jax.inference import decode
from kvpop_jax.inference.decode import Setup
from kvpop_jax.inference.memory import memory_explained
from kvpop_jax.inference.results import CacheReport, Completion, cache_reports, completion, own_tokens
from kvpop_jax.inference.sampling import SamplingParams
from kvpop_jax.models import LoadedModel, Message, encode_messages, encode_prompt, load_model, text_pieces
from kvpop_jax.policies import Policy, PolicySettings, make, uniform_budgets
from kvpop_jax.scorers.files import load_scorer
from pallas_kernels.backend import platform

Prompt = str | Sequence[Message] | Sequence[int]
"""A user's message, the turns of a chat, or token ids."""

STEPS_PER_DISPATCH = 32
SHORTEST_BUCKET = 64

SLOT_MULTIPLE = {"gpu": 64, "tpu": 128}
"""What buffers are rounded up to, by platform: kernels read blocks of this many slots."""


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
        cache_dtype: "int8" or "fp8" to keep keys and values in 8 bits, one scale for each row; None for the type of the
            weights. A budget stays a number of entries; a policy's own state takes more of the smaller ones.

    Raises:
        UserError: policies, budgets or scorers that are not one per layer, a budget that leaves no pool, or a
            cache_dtype that is unknown or that a policy cannot work with.
    """

    model: LoadedModel
    policy: Policy | Sequence[Policy]
    budget: int | Sequence[int] | None
    scorers: Sequence[Any] | None = field(default=None, repr=False)
    pin_prompt: bool = False
    cache_dtype: str | None = None
    _compiled: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    _prefill_parts: decode.Programs = field(default_factory=decode.compile_prefill, init=False, repr=False)

    def __post_init__(self) -> None:
        layers = self.model.config.num_layers
        for name, value in (("policy", self.policy), ("budget", self.budget), ("scorers", self.scorers)):
            if isinstance(value, Sequence) and len(value) != layers:
                raise UserError(f"{name} has {len(value)} entries; the model has {layers} layers")
        cache_dtype_of(self.cache_dtype, self.model.dtype)
        for policy in self.policies:
            if self.cache_dtype is not None and policy.rewrites:
                raise UserError(
                    f"cache_dtype {self.cache_dtype}: policy {policy.name} rewrites cached rows, which would be "
                    "rounded again at every step; leave cache_dtype out or take another policy"
                )
        if self.budget is not None:
            self.plans(0)  # Refuses an impossible budget before any work.

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        policy: str | None = None,
        budget: int | None = None,
        scorer: str | None = None,
        sinks: int = 4,
        window: int = 32,
        pin_prompt: bool = False,
        dtype: DTypeLike | None = None,
        cache_dtype: str | None = None,
    ) -> "Generator":
        """A generator from files.

        Args:
            model: what `load_model` takes.
            policy: its name, or two as "prefill+decode"; by default that of the scorer, and dense without one.
            budget: entries per KV head; None for as many as a sequence can have tokens.
            scorer: folder that training exported; sinks and window are its own then.
            sinks, window: of policies that have them.
            pin_prompt: never evict the prompt.
            dtype: of the weights; by default float32 on a CPU, bfloat16 on an accelerator.
            cache_dtype: "int8" or "fp8" to quantise cached keys and values; None for `dtype`.

        Raises:
            UserError: files that cannot be read or do not belong together, an unknown policy, one without its scorer, a
                budget that leaves no pool or that the scorer was not trained for.
        """
        loaded = load_model(model, dtype)
        if scorer is None:
            name = policy or "dense"
            made = make(name, PolicySettings(sinks, window))
            return cls(loaded, made, budget, pin_prompt=pin_prompt, cache_dtype=cache_dtype)
        trained = load_scorer(scorer, loaded, budgets=() if budget is None else (budget,))
        name = policy or trained.policy
        made = make(name, PolicySettings(trained.sinks, trained.window, trained.scorer))
        owned = [trained.params if part == trained.policy else None for part in name.split("+")]
        return cls(loaded, made, budget, _by_layer(owned, loaded.config.num_layers), pin_prompt, cache_dtype)

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
        dtype = cache_dtype_of(self.cache_dtype, self.model.dtype)
        size, rows = entry_bytes(config.head_dim, dtype), None if self.cache_dtype is None else dtype.name
        if self.budget is None:
            budgets = uniform_budgets(length, config.num_layers)
        elif isinstance(self.budget, Sequence):
            budgets = tuple(self.budget)
        else:
            spread = self.policy.layer_budgets if isinstance(self.policy, Policy) else uniform_budgets
            budgets = spread(self.budget, config.num_layers)
        multiple = SLOT_MULTIPLE.get(platform(), 1)
        pairs = zip(self.policies, budgets, strict=True)
        plans = (policy.plan(budget, config, size).aligned(multiple) for policy, budget in pairs)
        return tuple(replace(plan, rows=rows) for plan in plans)

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
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        seeds: Sequence[int] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Completes all prompts as one batch.

        Args:
            prompts: messages, chats or token ids, see `encode`; lengths may differ.
            sampling: how tokens are drawn, and how many at most.
            seeds: one per prompt; a row's completion depends on its prompt and its seed only. Default: 0, 1, ...
            progress: called after each dispatch with the number of new tokens of unfinished rows.

        Raises:
            UserError: an empty prompt, one too long for the model, one that pinning leaves no pool for, tokens that the
                model does not have, seeds that are not one per prompt, or caches that do not fit on the device.
        """
        if not prompts:
            return []
        self.check_stop_tokens(sampling)
        setup, token_BS, length_B = self._prepare(self.encode(prompts), sampling.max_new_tokens)
        seed_B = row_seeds(seeds, len(prompts))
        with memory_explained(setup, len(prompts), self.model.dtype):
            return self._generate(setup, token_BS, length_B, seed_B, sampling, progress)

    def _generate(
        self,
        setup: Setup,
        token_BS: Int[np.ndarray, "B S"],
        length_B: Int[np.ndarray, "B"],
        seed_B: Int[np.ndarray, "B"],
        sampling: SamplingParams,
        progress: Callable[[int], None] | None,
    ) -> list[Completion]:
        state = self._start(setup, sampling, token_BS, length_B, seed_B)
        steps = self.steps_program(setup, sampling, STEPS_PER_DISPATCH)
        tokens: list[Array] = []
        log_probs: list[Array] = []
        while len(tokens) * STEPS_PER_DISPATCH < sampling.max_new_tokens:
            unfinished = int(jnp.sum(~state.done_B))
            state, token_nB, log_prob_nB = steps(self.model.params, self.layer_scorers, state)
            tokens.append(token_nB)
            log_probs.append(log_prob_nB)
            if progress is not None:
                progress(unfinished * STEPS_PER_DISPATCH)
            if bool(state.done_B.all()):
                break
        token_nB, log_prob_nB = np.concatenate(jax.device_get(tokens)), np.concatenate(jax.device_get(log_probs))
        own_B = own_tokens(token_nB, setup.config, sampling, np.full(len(seed_B), sampling.max_new_tokens))
        rows = zip(own_B, token_nB.T, log_prob_nB.T, cache_reports(setup, state.caches, state.usage), strict=True)
        return [
            completion(self.model.tokenizer, token_n[:own].tolist(), log_prob_n[:own].tolist(), sampling, report)
            for own, token_n, log_prob_n, report in rows
        ]

    def stream(self, prompt: Prompt, sampling: SamplingParams, seed: int = 0) -> Iterator[str]:
        """Yields one completion's text as it is made, in pieces that join to `Completion.text`.

        Raises:
            UserError: as `generate`, or a model without tokenizer.
        """
        return text_pieces(self._tokenizer(), self.stream_tokens(prompt, sampling, seed))

    def stream_tokens(self, prompt: Prompt, sampling: SamplingParams, seed: int = 0) -> Iterator[int]:
        """Yields one completion's token ids as they are made.

        Raises:
            UserError: as `generate`.
        """
        self.check_stop_tokens(sampling)
        setup, token_BS, length_B = self._prepare(self.encode([prompt]), sampling.max_new_tokens)
        steps = self.steps_program(setup, sampling, 1)
        with memory_explained(setup, 1, self.model.dtype):
            state = self._start(setup, sampling, token_BS, length_B, row_seeds([seed], 1))
            jax.block_until_ready(state.token_B)
        for _ in range(sampling.max_new_tokens):
            if bool(state.done_B[0]):
                return
            yield int(state.token_B[0])
            state, _tokens, _log_probs = steps(self.model.params, self.layer_scorers, state)

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
        prefill = self.prefill_program(setup)
        step = self.compiled("step", setup, lambda: jax.jit(partial(decode.decode_step, setup), donate_argnums=(2,)))
        seed_B = row_seeds(seeds, B)
        with memory_explained(setup, B, self.model.dtype):
            logits_BV, caches = prefill(self.model.params, self.layer_scorers, token_BS, length_B, seed_B)
            jax.block_until_ready(logits_BV)
        usage = _usage(caches, length_B)
        yield logits_BV
        for t in range(prompt_length, T - 1):
            position_B = jnp.full(B, t, jnp.int32)
            rows = text_BT[:, t], position_B, length_B, np.full(B, True), seed_B
            logits_BV, caches = step(self.model.params, self.layer_scorers, caches, *rows)
            now = _usage(caches, length_B)
            usage = _higher(usage, now)
            yield logits_BV
        return cache_reports(setup, caches, usage)

    def encode(self, prompts: Sequence[Prompt]) -> list[Sequence[int]]:
        """Token ids of prompts.

        Args:
            prompts: each a user's message as a string or a chat as a list of turns {"role": ..., "content": ...}, which
                are put into the tokenizer's chat template, or token ids, taken as they are.

        Raises:
            UserError: a string where a list of prompts belongs, or words for a model without tokenizer.
        """
        if isinstance(prompts, str):
            raise UserError("prompts is one string; give a list of them")
        return [self._encode(prompt) for prompt in prompts]

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return encode_prompt(self._tokenizer(), prompt)
        if len(prompt) and isinstance(prompt[0], Mapping):
            return encode_messages(self._tokenizer(), cast(Sequence[Message], prompt))
        return cast(Sequence[int], prompt)

    def _tokenizer(self) -> Any:
        if self.model.tokenizer is None:
            raise UserError(f"model {self.model.source} has no tokenizer; give token ids and take token ids")
        return self.model.tokenizer

    def check_tokens(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuses what is no token id of the model: a look-up would quietly take another.

        Raises:
            UserError: naming the prompt and the id.
        """
        size = self.model.config.vocab_size
        for row, prompt in enumerate(prompts):
            if len(prompt) and np.asarray(prompt).dtype.kind not in "iu":
                raise UserError(
                    f"prompt {row} begins with {prompt[0]!r}; give a message as one string, the turns of a chat, or "
                    "token ids, which are whole numbers"
                )
            for token in (min(prompt), max(prompt)) if len(prompt) else ():
                if not 0 <= token < size:
                    raise UserError(f"prompt {row} has token {token}; the model's tokens are 0 to {size - 1}")

    def check_stop_tokens(self, sampling: SamplingParams) -> None:
        """Refuses stop tokens that the model cannot make.

        Raises:
            UserError: naming the id.
        """
        size = self.model.config.vocab_size
        for token in sampling.stop_tokens:
            if not 0 <= token < size:
                raise UserError(f"stop_tokens has {token}; the model's tokens are 0 to {size - 1}")

    def setup(self, lengths: Sequence[int], new_tokens: int) -> Setup:
        """What is fixed for prompts of those lengths with up to `new_tokens` more each.

        Raises:
            UserError: an empty prompt, one too long for the model or for what its policy keeps, one that pinning leaves
                no pool for.
        """
        limit = self.model.config.max_position
        for row, length in enumerate(lengths):
            if length == 0:
                raise UserError(f"prompt {row} is empty; it needs at least one token")
            if length + new_tokens > limit:
                raise UserError(
                    f"prompt {row} has {length} tokens and max_new_tokens is {new_tokens}: "
                    f"together they pass the model's limit of {limit}"
                )
        longest = max(lengths)
        steps = -(-new_tokens // STEPS_PER_DISPATCH) * STEPS_PER_DISPATCH
        self.check_prompt(longest)
        plans = self.plans(bucket(longest) + steps)
        for policy, plan in zip(self.policies, plans, strict=True):
            if policy.decode == "dense" and plan.capacity < longest + new_tokens:
                raise UserError(
                    f"policy {policy.name} keeps everything: a budget of {plan.budget} cannot hold "
                    f"{longest} + {new_tokens} tokens; give it no budget"
                )
        return Setup(self.model.config, self.policies, plans, self.pin_prompt)

    @property
    def layer_scorers(self) -> Sequence[Any]:
        """The parameters of every layer's policy."""
        return self.scorers if self.scorers is not None else [None] * self.model.config.num_layers

    def prefill_program(self, setup: Setup) -> Callable[..., Any]:
        """`decode.prefill` for that setup: (parameters, scorers, tokens, lengths, seeds) -> logits, caches."""
        return self.compiled("prefill", setup, lambda: partial(decode.prefill, setup, programs=self._prefill_parts))

    def steps_program(self, setup: Setup, sampling: SamplingParams, steps: int) -> Callable[..., Any]:
        """`decode_steps` compiled for that setup: (parameters, scorers, state) -> state, tokens, log-probabilities."""
        build = partial(decode.decode_steps, setup, sampling=sampling, steps=steps)
        return self.compiled("steps", (setup, sampling, steps), lambda: jax.jit(build, donate_argnums=(2,)))

    def compiled(self, name: str, statics: Hashable, build: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The program of that name for those statics, built once."""
        key = (name, statics)
        if key not in self._compiled:
            self._compiled[key] = build()
        return self._compiled[key]

    def _prepare(self, prompts, new_tokens):
        lengths = [len(prompt) for prompt in prompts]
        setup = self.setup(lengths, new_tokens)
        self.check_tokens(prompts)
        return setup, padded(prompts, bucket(max(lengths))), np.asarray(lengths, np.int32)

    def _start(self, setup, sampling, token_BS, length_B, seed_B):
        build = partial(decode.first_state, setup, sampling=sampling)
        first_state = self.compiled("first_state", (setup, sampling), lambda: jax.jit(build, donate_argnums=(1,)))
        prefill = self.prefill_program(setup)
        logits_BV, caches = prefill(self.model.params, self.layer_scorers, token_BS, length_B, seed_B)
        return first_state(logits_BV, caches, length_B, seed_B)


_usage = jax.jit(decode.cache_usage)
_higher = jax.jit(decode.higher_usage)


def _by_layer(owned, layers):
    """The parameters of a policy's parts, each one list over layers, as those of every layer; of two parts a pair."""
    if not any(owned):
        return None
    found = [tuple(None if part is None else part[layer] for part in owned) for layer in range(layers)]
    return [parts[0] for parts in found] if len(owned) == 1 else found


def bucket(length: int) -> int:
    """What a prompt of that many tokens is padded to: a power of two, so that few shapes are ever compiled."""
    return max(SHORTEST_BUCKET, 1 << (length - 1).bit_length())


def padded(prompts: Sequence[Sequence[int]], size: int) -> Int[np.ndarray, "B S"]:
    """The prompts as rows of `size` tokens, padded on the right."""
    token_BS = np.zeros((len(prompts), size), np.int32)
    for row, prompt in enumerate(prompts):
        token_BS[row, : len(prompt)] = prompt
    return token_BS


def row_seeds(seeds: Sequence[int] | None, rows: int) -> Int[np.ndarray, "B"]:
    """One random stream per row; by default 0, 1, ...

    Raises:
        UserError: seeds that are not one per prompt.
    """
    seeds = range(rows) if seeds is None else seeds
    if len(seeds) != rows:
        raise UserError(f"{len(seeds)} seeds for {rows} prompts; give one per prompt")
    return np.asarray([seed % 2**31 for seed in seeds], np.int32)
