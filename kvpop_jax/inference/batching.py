"""Continuous batching: a row whose sequence has ended is handed to the next prompt while the other rows go on.

Every sequence's cache has the same fixed size, so a row changes hands by writing over it: nothing is paged, nothing
grows, and one program decodes whatever the rows hold. Prompts are prefilled apart, in groups of one shape per bucket.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvpop_jax.cache import LayerCache
from kvpop_jax.errors import UserError
from kvpop_jax.inference import decode
from kvpop_jax.inference.decode import DecodeState, Setup
from kvpop_jax.inference.generator import STEPS_PER_DISPATCH, Generator, Prompt, bucket, padded, row_seeds
from kvpop_jax.inference.memory import memory_explained
from kvpop_jax.inference.results import Completion, cache_reports, completion, own_tokens
from kvpop_jax.inference.sampling import SamplingParams

GROUP_TOKENS, GROUP_PROMPTS = 2048, 4
"""Prompts prefilled at once: as many as fit in so many tokens with their padding, and not more than so many."""


@dataclass(frozen=True)
class BatchStatistics:
    """How well a batch was used. Times are in seconds since it began, which is when all requests arrived.

    Attributes:
        requests: completions that are finished.
        tokens: generated, those of unfinished completions included.
        seconds: since the start, compilation included.
        tokens_per_second: of all rows together.
        rows: of the batch.
        occupancy: share of all rows' steps that made a token of a completion; the rest were steps after a row's end.
        queue_wait_mean, queue_wait_max: until a request got its row.
        first_token_mean, first_token_max: until a request's first token was known.
    """

    requests: int
    tokens: int
    seconds: float
    tokens_per_second: float
    rows: int
    occupancy: float
    queue_wait_mean: float
    queue_wait_max: float
    first_token_mean: float
    first_token_max: float


def complete(
    generator: Generator,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    rows: int,
    seeds: Sequence[int] | None = None,
    progress: Callable[[BatchStatistics], None] | None = None,
) -> Iterator[tuple[int, Completion]]:
    """Completes any number of prompts on `rows` rows; each completion comes as it ends, with its prompt's index.

    A completion is the one that `Generator.generate` gives for its prompt and seed, whatever else is in the batch. Only
    where two tokens are equally likely up to rounding may the number of rows decide: it shapes the compiled program.
    Prompts of the longest bucket start first. A prompt that appears several times is prefilled once, unless its policy
    draws from the seeds ("seed" in `Policy.signals`). Beside the rows, the caches of one group of prefilled prompts are
    held. While the caller works on a completion, the device goes on with the rest.

    Args:
        generator: model, policy and budget. Without a budget every row has slots for the longest request.
        prompts: messages, chats or token ids, as `Generator.encode` takes them; lengths may differ.
        sampling: how tokens are drawn, and how many at most.
        rows: sequences decoded together. All of them are computed, so more than there are prompts are a waste.
        seeds: one per prompt. Default: 0, 1, ...
        progress: given the statistics so far after every dispatch.

    Raises:
        UserError: fewer than one row, or as `Generator.generate`; at once, not when the first completion is asked for,
            but for caches that do not fit on the device.
    """
    if rows < 1:
        raise UserError(f"rows must be at least 1, not {rows}")
    seed_B = row_seeds(seeds, len(prompts))
    if not prompts:
        return iter(())
    encoded = generator.encode(prompts)
    setup = generator.setup([len(prompt) for prompt in encoded], sampling.max_new_tokens)
    generator.check_tokens(encoded)
    generator.check_stop_tokens(sampling)
    return _run(generator, setup, encoded, seed_B, sampling, rows, progress or (lambda statistics: None))


@dataclass
class _Group:
    """Prompts that were prefilled together, on their way into rows.

    Attributes:
        logits_GV, caches, length_G: after the prompts.
        forks: those still to be taken: a prompt's place in the group, and the request it is for.
    """

    logits_GV: Float[Array, "G V"]
    caches: list[LayerCache]
    length_G: Int[np.ndarray, "G"]
    forks: list[tuple[int, int]]

    def take(self, most: int) -> list[tuple[int, int]]:
        """The next forks, at most `most` and at most as many as there are prompts."""
        count = min(most, len(self.length_G))
        taken, self.forks = self.forks[:count], self.forks[count:]
        return taken


@dataclass
class _Row:
    """What a row has made so far of one request."""

    request: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class _Clock:
    """Counts and times for the statistics."""

    rows: int
    start: float = field(default_factory=time.perf_counter)
    waits: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0
    steps: int = 0

    def now(self) -> float:
        return time.perf_counter() - self.start

    def statistics(self) -> BatchStatistics:
        seconds = self.now()
        return BatchStatistics(
            requests=self.requests,
            tokens=self.tokens,
            seconds=seconds,
            tokens_per_second=self.tokens / seconds,
            rows=self.rows,
            occupancy=self.tokens / (self.steps * self.rows),
            queue_wait_mean=float(np.mean(self.waits)),
            queue_wait_max=max(self.waits),
            first_token_mean=float(np.mean(self.firsts)),
            first_token_max=max(self.firsts),
        )


def _run(
    generator: Generator,
    setup: Setup,
    prompts: Sequence[Sequence[int]],
    seed_B: Int[np.ndarray, "B"],
    sampling: SamplingParams,
    rows: int,
    progress: Callable[[BatchStatistics], None],
) -> Iterator[tuple[int, Completion]]:
    steps = generator.steps_program(setup, sampling, STEPS_PER_DISPATCH)
    build = partial(_admit, setup, sampling=sampling)
    admit = generator.compiled("admit", (setup, sampling), lambda: jax.jit(build, donate_argnums=(0,)))
    groups = _prefilled_groups(generator, setup, prompts, seed_B)
    group: _Group | None = None
    clock = _Clock(rows)
    held: dict[int, _Row] = {}
    state: DecodeState | None = None
    ended: list[tuple[int, Completion]] = []
    while True:
        first_tokens = []
        with memory_explained(setup, rows, generator.model.dtype):
            while free := [row for row in range(rows) if row not in held]:
                if group is None or not group.forks:
                    group = None  # Its caches go before those of the next are made.
                    if (group := next(groups, None)) is None:
                        break
                if state is None:
                    state = _idle(setup, group, sampling, rows)
                forks = group.take(len(free))
                requests = [request for _, request in forks]
                # The program has one shape: places without a fork name a row past the last.
                row_R = _filled(free[: len(forks)], rows, group)
                source_R = _filled([source for source, _ in forks], 0, group)
                seed_R = _filled(seed_B[requests].tolist(), 0, group)
                state, token_R = admit(state, group.logits_GV, group.caches, group.length_G, source_R, seed_R, row_R)
                first_tokens.append((token_R, len(forks)))
                clock.waits += [clock.now()] * len(forks)
                held |= {row: _Row(request) for row, request in zip(free, requests, strict=False)}
            if not held:
                break
            assert state is not None
            state, token_nB, log_prob_nB = steps(generator.model.params, generator.layer_scorers, state)
            for token_R, count in first_tokens:
                jax.block_until_ready(token_R)
                clock.firsts += [clock.now()] * count
        # The caller has them while the device is at work on what was just dispatched.
        yield from ended
        with memory_explained(setup, rows, generator.model.dtype):  # what a dispatch lacks may only be known here
            ended = _collect(generator, setup, state, (token_nB, log_prob_nB), sampling, held, clock)
        progress(clock.statistics())
    yield from ended


def _prefilled_groups(
    generator: Generator, setup: Setup, prompts: Sequence[Sequence[int]], seed_B: Int[np.ndarray, "B"]
) -> Iterator[_Group]:
    """Prefills group by group, each when it is asked for, and keeps hold of none."""
    for size, families in groupby(_families(setup, prompts), key=lambda family: bucket(len(prompts[family[0]]))):
        chosen = list(families)
        G = min(GROUP_PROMPTS, max(1, GROUP_TOKENS // size))
        for together in (chosen[start : start + G] for start in range(0, len(chosen), G)):
            # A last group that is not full repeats its last prompt: one shape a bucket.
            first_G = [family[0] for family in together] + [together[-1][0]] * (G - len(together))
            forks = [(source, request) for source, family in enumerate(together) for request in family]
            yield _prefilled(generator, setup, [prompts[request] for request in first_G], size, seed_B[first_G], forks)


def _prefilled(
    generator: Generator,
    setup: Setup,
    prompts: Sequence[Sequence[int]],
    size: int,
    seed_G: Int[np.ndarray, "G"],
    forks: list[tuple[int, int]],
) -> _Group:
    prefill = generator.prefill_program(setup)
    length_G = np.array([len(prompt) for prompt in prompts], np.int32)
    params, scorers = generator.model.params, generator.layer_scorers
    logits_GV, caches = prefill(params, scorers, padded(prompts, size), length_G, seed_G)
    return _Group(logits_GV, caches, length_G, forks)


def _families(setup: Setup, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The requests that share a prefill, those of the longest bucket first."""
    apart = any("seed" in policy.signals for policy in setup.policies)
    found: dict[int | tuple[int, ...], list[int]] = {}
    for request, prompt in enumerate(prompts):
        found.setdefault(request if apart else tuple(prompt), []).append(request)
    return sorted(found.values(), key=lambda family: -bucket(len(prompts[family[0]])))


def _filled(values: Sequence[int], rest: int, group: _Group) -> Int[np.ndarray, "R"]:
    """The values, and `rest` up to the size of the group."""
    return np.array([*values, *[rest] * (len(group.length_G) - len(values))], np.int32)


def _idle(setup: Setup, group: _Group, sampling: SamplingParams, rows: int) -> DecodeState:
    """A state of that many rows that nobody waits for."""
    begin = partial(decode.first_state, setup, sampling=sampling)
    like = jax.eval_shape(begin, group.logits_GV, group.caches, group.length_G, group.length_G)

    def zeros() -> DecodeState:
        state = jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), like)
        # A prompt of some length, for shares of it are computed.
        return replace(state, prompt_B=jnp.ones_like(state.prompt_B), done_B=jnp.ones_like(state.done_B))

    return jax.jit(zeros)()


def _admit(
    setup: Setup,
    state: DecodeState,
    logits_GV: Float[Array, "G V"],
    caches: list[LayerCache],
    length_G: Int[Array, "G"],
    source_R: Int[Array, "R"],
    seed_R: Int[Array, "R"],
    row_R: Int[Array, "R"],
    *,
    sampling: SamplingParams,
) -> tuple[DecodeState, Int[Array, "R"]]:
    """Writes forks of prefilled prompts over rows of the batch.

    Args:
        setup, sampling: as in `decode_steps`.
        state: of the batch.
        logits_GV, caches, length_G: of the prefilled prompts.
        source_R, seed_R: which of them each fork is of, and its own random stream.
        row_R: the row it gets; one past the last for no fork.

    Returns:
        The state, and the first token of each fork.
    """
    logits_RV, forked, length_R = jax.tree.map(lambda leaf: leaf[source_R], (logits_GV, caches, length_G))
    fresh = decode.first_state(setup, logits_RV, forked, length_R, seed_R, sampling)
    state = jax.tree.map(lambda old, new: old.at[row_R].set(new, mode="drop"), state, fresh)
    return state, fresh.token_B


def _collect(
    generator: Generator,
    setup: Setup,
    state: DecodeState,
    emitted: tuple[Int[Array, "n B"], Float[Array, "n B"]],
    sampling: SamplingParams,
    held: dict[int, _Row],
    clock: _Clock,
) -> list[tuple[int, Completion]]:
    """Waits for a dispatch, gives its tokens to their rows, and frees the rows that have ended: their completions."""
    token_nB, log_prob_nB, done_B, usage = jax.device_get((*emitted, state.done_B, state.usage))
    limit_B = np.zeros(len(done_B), np.int64)
    for number, row in held.items():
        limit_B[number] = sampling.max_new_tokens - len(row.tokens)
    own_B = own_tokens(token_nB, setup.config, sampling, limit_B)
    for number, row in held.items():
        row.tokens += token_nB[: own_B[number], number].tolist()
        row.logprobs += log_prob_nB[: own_B[number], number].tolist()
    over = [number for number, row in held.items() if done_B[number] or len(row.tokens) == sampling.max_new_tokens]
    clock.tokens += int(own_B.sum())
    clock.steps += len(token_nB)
    clock.requests += len(over)
    reports = cache_reports(setup, state.caches, jax.tree.map(lambda leaf: leaf[over], usage))
    rows = [held.pop(number) for number in over]
    return [
        (row.request, completion(generator.model.tokenizer, row.tokens, row.logprobs, sampling, report))
        for row, report in zip(rows, reports, strict=True)
    ]
