"""Tasks that read text: every policy and the dense model go over it side by side, one token at a time."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.contestants import Contestant, dense_contestant
from kvpop_jax.evaluation.jobs import Job, Progress, batches, conditions
from kvpop_jax.evaluation.records import Rollout, derived_seed, rollout_key
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks import TextTask, Window
from kvpop_jax.models import LoadedModel

METRICS = ("nll", "agreement", "kl")


def plan(task: TextTask, model: LoadedModel, contestants: Sequence[Contestant], settings: EvalSettings) -> list[Job]:
    """All windows of the task for every contestant; each is read once, whatever the number of rollouts.

    Raises:
        UserError: A window is longer than the model's limit, or pinning its prefix leaves no pool.
    """
    windows = task.windows(settings, model.tokenizer)
    limit = model.config.max_position
    longest = max(len(window.tokens) for window in windows)
    if longest > limit:
        raise UserError(f"{task.name}: lengths asks for {longest} tokens; the model's limit is {limit}")
    jobs = []
    for contestant in contestants:
        contestant.check_prompt(max(window.prefix for window in windows), task.name)
        shared = conditions(contestant, task.name, model, settings)
        for window in windows:
            seed = derived_seed(settings.seed, window.id, 0)
            key = rollout_key(shared | {"prefix": window.prefix}, window.id, str(window.tokens), seed)
            jobs.append(Job(key, contestant, window, window.tokens[: window.prefix], 0, seed))
    return jobs


def run(
    task: TextTask,
    pending: Sequence[Job],
    model: LoadedModel,
    contestants: Sequence[Contestant],
    settings: EvalSettings,
    progress: Progress,
) -> Iterator[list[Rollout]]:
    """Does the pending jobs; yields each contestant's results for a batch of windows as the batch finishes.

    The dense model reads every batch once, beside the contestants that still have to, and is what they are compared to;
    its cache is not quantised.
    """
    full = (one for one in contestants if one.budget is None and one.generator.cache_dtype is None)
    reference = next(full, None) or dense_contestant(model)
    by_window: dict[Window, list[Job]] = {}
    for job in pending:
        assert isinstance(job.item, Window)
        by_window.setdefault(job.item, []).append(job)

    def together(window: Window) -> tuple[int, int, list[str]]:
        # Windows of the same length and prefix that the same contestants have yet to read share a batch.
        return len(window.tokens), window.prefix, [job.contestant.name for job in by_window[window]]

    for _, group in groupby(by_window, key=together):
        for batch in batches(list(group), settings.batch_size):
            readers = [list(jobs) for jobs in zip(*(by_window[window] for window in batch), strict=True)]
            yield from _read(task, batch, readers, reference, progress)


class _Reader:
    """One contestant's pass over a batch of windows, timed."""

    def __init__(self, contestant: Contestant, token_BT: Array, prefix: int, seeds: Sequence[int]):
        self.contestant = contestant
        self.seconds = 0.0
        self._steps = contestant.generator.teacher_forced(token_BT, prefix, seeds)

    def step(self) -> Float[Array, "B V"]:
        """Logits of the next token. Waits for them, so that the time is this contestant's own."""
        start = time.perf_counter()
        logits_BV = jax.block_until_ready(next(self._steps))
        self.seconds += time.perf_counter() - start
        return logits_BV

    def reports(self) -> list[dict[str, Any]]:
        """What the cache cost, once all tokens were read; one report a window."""
        try:
            next(self._steps)
        except StopIteration as end:
            return [dataclasses.asdict(report) for report in end.value]
        raise RuntimeError(f"{self.contestant.name}: asked for the cache report before all tokens were read")


def _read(
    task: TextTask,
    windows: Sequence[Window],
    jobs: Sequence[Sequence[Job]],
    reference: Contestant,
    progress: Progress,
) -> Iterator[list[Rollout]]:
    """Reads one batch of windows with the contestants of `jobs` (for each, its jobs in the order of the windows)."""
    token_BT = jnp.array([window.tokens for window in windows], jnp.int32)
    prefix, length = windows[0].prefix, len(windows[0].tokens)
    seeds = [job.seed for job in jobs[0]]
    readers = [_Reader(chosen[0].contestant, token_BT, prefix, seeds) for chosen in jobs]
    dense = next((reader for reader in readers if reader.contestant is reference), None)
    dense = dense or _Reader(reference, token_BT, prefix, seeds)
    total = {reader: jnp.zeros((len(windows), len(METRICS)), jnp.float32) for reader in readers}
    for position in range(prefix, length):
        dense_BV = dense.step()
        for reader in readers:
            logits_BV = dense_BV if reader is dense else reader.step()
            total[reader] += compare(dense_BV, logits_BV, token_BT[:, position])
        progress.tokens(len(windows) * len(readers))
    scored = length - prefix
    for reader, chosen in zip(readers, jobs, strict=True):
        mean_BM = jax.device_get(total[reader] / scored)
        yield [
            Rollout(
                key=job.key,
                task=task.name,
                group=window.group,
                problem=window.id,
                policy=job.contestant.policy,
                budget=job.contestant.budget,
                rollout=0,
                seed=job.seed,
                prompt="",
                text="",
                prompt_tokens=prefix,
                tokens=scored,
                finish_reason="stop",
                grade=dict(zip(METRICS, map(float, mean_M), strict=True)),
                extracted=None,
                seconds=reader.seconds / len(windows),
                cache=cache,
            )
            for job, window, mean_M, cache in zip(chosen, windows, mean_BM, reader.reports(), strict=True)
        ]


@jax.jit
def compare(
    dense_BV: Float[Array, "B V"], logits_BV: Float[Array, "B V"], target_B: Int[Array, "B"]
) -> Float[Array, "B M"]:
    """The metrics of one predicted token, in the order of `METRICS`.

    Negative log-likelihood of the target in nats; 1 where the likeliest token is the dense model's; KL(dense || policy)
    in nats.
    """
    dense_BV, logp_BV = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (dense_BV, logits_BV))
    nll_B = -jnp.take_along_axis(logp_BV, target_B[:, None], axis=-1)[:, 0]
    agreement_B = (dense_BV.argmax(-1) == logp_BV.argmax(-1)).astype(jnp.float32)
    kl_B = jnp.sum(jnp.exp(dense_BV) * (dense_BV - logp_BV), axis=-1)
    return jnp.stack([nll_B, agreement_B, kl_B], axis=-1)
