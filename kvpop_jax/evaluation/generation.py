"""Tasks answered by generated text: what there is to do, and doing it in one continuous batch per contestant."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from time import perf_counter

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.contestants import Contestant
from kvpop_jax.evaluation.jobs import Job, Progress, conditions
from kvpop_jax.evaluation.records import Rollout, derived_seed, rollout_key
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks import GenerationTask, Problem
from kvpop_jax.evaluation.tasks.base import encode_problem
from kvpop_jax.inference import Completion, SamplingParams, complete
from kvpop_jax.models import LoadedModel


def plan(
    task: GenerationTask, model: LoadedModel, contestants: Sequence[Contestant], settings: EvalSettings
) -> list[Job]:
    """All rollouts of the task, contestant by contestant, longest prompts first.

    Sorted so that prompts of similar length are prefilled together, and so that what does not fit in memory fails at
    once. Rollouts of a problem stand side by side: they share its prefill.

    Raises:
        UserError: A prompt and its completion would pass the model's limit, or pinning a prompt leaves no pool.
    """
    sampling = sampling_of(task, settings)
    prompts = {
        problem: tuple(encode_problem(model.tokenizer, problem)) for problem in task.problems(settings, model.tokenizer)
    }
    longest = max(map(len, prompts.values()))
    limit = model.config.max_position
    if longest >= limit:
        raise UserError(
            f"{task.name}: its longest prompt has {longest} tokens, and the model's limit is {limit}; "
            f"ask for shorter --lengths, or cut prompts by --max_prompt_tokens"
        )
    if longest + sampling.max_new_tokens > limit:
        raise UserError(
            f"{task.name}: its longest prompt has {longest} tokens, and {sampling.max_new_tokens} new ones pass the "
            f"model's limit of {limit}; set --max_new_tokens to at most {limit - longest}"
        )
    jobs = []
    for contestant in contestants:
        contestant.check_prompt(longest, task.name)
        shared = conditions(contestant, task.name, model, settings) | {"sampling": dataclasses.asdict(sampling)}
        for problem in sorted(prompts, key=lambda problem: -len(prompts[problem])):
            for rollout in range(settings.rollouts):
                seed = derived_seed(settings.seed, problem.id, rollout)
                # The answer shapes the grade: one that was corrected must not find the old grade.
                key = rollout_key(
                    shared | {"answer": problem.answer}, problem.id, problem.prompt + problem.opening, seed
                )
                jobs.append(Job(key, contestant, problem, prompts[problem], rollout, seed))
    return jobs


def run(
    task: GenerationTask,
    pending: Sequence[Job],
    model: LoadedModel,
    contestants: Sequence[Contestant],
    settings: EvalSettings,
    progress: Progress,
) -> Iterator[list[Rollout]]:
    """Does the pending jobs, contestant by contestant; yields every rollout, graded, as it finishes.

    A row of the batch takes the next rollout when its own ends.
    """
    sampling = sampling_of(task, settings)
    for contestant, group in groupby(pending, key=lambda job: job.contestant):
        jobs = list(group)
        completions = complete(
            contestant.generator,
            [job.prompt for job in jobs],
            sampling,
            rows=min(settings.batch_size, len(jobs)),
            seeds=[job.seed for job in jobs],
            progress=partial(progress.batch, contestant),
        )
        last = perf_counter()
        for index, completion in completions:
            now = perf_counter()
            yield [_graded(task, jobs[index], completion, now - last)]
            last = now


def sampling_of(task: GenerationTask, settings: EvalSettings) -> SamplingParams:
    """How the task's completions are drawn."""
    return SamplingParams(
        temperature=settings.sampling_temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        max_new_tokens=settings.max_new_tokens or task.max_new_tokens(settings),
    )


def _graded(task: GenerationTask, job: Job, completion: Completion, seconds: float) -> Rollout:
    assert isinstance(job.item, Problem)
    grade = task.grade(job.item, completion.text)
    return Rollout(
        key=job.key,
        task=task.name,
        group=job.item.group,
        problem=job.item.id,
        policy=job.contestant.policy,
        budget=job.contestant.budget,
        rollout=job.rollout,
        seed=job.seed,
        prompt=job.item.prompt + job.item.opening,
        text=completion.text,
        prompt_tokens=len(job.prompt),
        tokens=len(completion.tokens),
        finish_reason=completion.finish_reason,
        grade={task.metric: grade.score},
        extracted=grade.extracted,
        seconds=seconds,
        cache=dataclasses.asdict(completion.cache),
    )
