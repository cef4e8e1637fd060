"""Method rollout: a model answers prompts with its full cache, and writes chats that a distillation reads as data."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from kvpop_jax import jsonl, policies
from kvpop_jax.config import TrainConfig
from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.records import derived_seed, rollout_key
from kvpop_jax.inference import BatchStatistics, Completion, Generator, SamplingParams, complete
from kvpop_jax.models import encode_messages, load_model
from kvpop_jax.policies import PolicySettings
from kvpop_jax.processes import is_first, wait_for_all
from kvpop_jax.sharding import local_mesh
from kvpop_jax.training.sources import refuse_benchmark

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class _Job:
    """One completion: its key, the prompt in words and in tokens, its number among those of the prompt, its seed."""

    key: str
    messages: Messages
    tokens: list[int]
    rollout: int
    seed: int


def write_rollouts(config: TrainConfig, folder: Path) -> None:
    """Completes every prompt that is not answered yet, several times if so asked.

    Each finished completion is appended at once as a row with `messages` to `folder`/part-0.jsonl (another number in
    another process: they share the prompts among them), or, if it was cut at the longest length, to the same file in
    the folder `rollouts_cut` beside it. A completion depends on the prompt, the seed and its number alone.

    Raises:
        UserError: a prompt file or model that cannot be read, a prompt too long for the model, or a mesh of which more
            than `model` is above 1.
    """
    settings = config.rollout
    config.mesh.only_model("mesh of method rollout")
    prompts = [row for path in _prompt_files(settings.prompts) for row in _read_prompts(path)]
    if not prompts:
        raise UserError(f"rollout.prompts: no prompts in {', '.join(settings.prompts)}")
    folders = {"stop": folder, "length": folder.with_name(folder.name + "_cut")}
    done = {
        json.loads(line)["key"]
        for part in folders.values()
        for path in part.glob("*.jsonl")
        for line in jsonl.whole_lines(path)
    }
    wait_for_all("read")  # before any of the files grows
    sampling = SamplingParams(settings.temperature, settings.top_k, settings.top_p, settings.max_new_tokens)
    mesh = local_mesh(config.mesh)
    with jax.set_mesh(mesh):
        model = load_model(str(config.model.source), None if config.dtype == "auto" else config.dtype, mesh)
        conditions = {"model": model.fingerprint, "dtype": model.dtype.name, "sampling": vars(sampling)}
        share = prompts[jax.process_index() :: jax.process_count()]
        jobs = [job for job in _jobs(config, share, conditions, model.tokenizer) if job.key not in done]
        generator = Generator(model, policies.make("dense", PolicySettings(0, 1)), None)
        for part in folders.values():
            part.mkdir(parents=True, exist_ok=True)
        print(f"{len(jobs)} of {len(share) * settings.per_prompt} completions to write to {folder}", flush=True)
        with tqdm(total=len(jobs), unit="completion", disable=None if is_first() else True) as bar:
            for index, completion in _complete(generator, jobs, sampling, settings.rows, bar):
                row = _row(jobs[index], completion)
                jsonl.append(folders[completion.finish_reason] / f"part-{jax.process_index()}.jsonl", [row])
                bar.update()
    wait_for_all("written")


def _complete(
    generator: Generator, jobs: Sequence[_Job], sampling: SamplingParams, rows: int, bar: Any
) -> Iterator[tuple[int, Completion]]:
    def show(batch: BatchStatistics) -> None:
        bar.set_postfix_str(
            f"{batch.tokens_per_second:.0f} tokens/s, {batch.occupancy:.0%} of rows busy", refresh=False
        )

    prompts, seeds = [job.tokens for job in jobs], [job.seed for job in jobs]
    return complete(generator, prompts, sampling, rows=min(rows, max(1, len(jobs))), seeds=seeds, progress=show)


def _jobs(
    config: TrainConfig, prompts: Sequence[Messages], conditions: dict[str, Any], tokenizer: Any
) -> Iterator[_Job]:
    for messages in prompts:
        text, tokens = json.dumps(messages, ensure_ascii=False), encode_messages(tokenizer, messages)
        for rollout in range(config.rollout.per_prompt):
            seed = derived_seed(config.seed, text, rollout)
            yield _Job(rollout_key(conditions, "", text, seed), messages, tokens, rollout, seed)


def _row(job: _Job, completion: Completion) -> dict[str, Any]:
    answer = {"role": "assistant", "content": completion.text}
    about = {"rollout": job.rollout, "seed": job.seed, "tokens": len(completion.tokens)}
    return {"key": job.key, "messages": [*job.messages, answer], **about, "finish_reason": completion.finish_reason}


def _prompt_files(paths: Sequence[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise UserError(f"rollout.prompts: {path} is neither a JSONL file nor a folder of them")
        for file in files:
            refuse_benchmark(file, "rollout.prompts")
        yield from files


def _read_prompts(path: Path) -> Iterator[Messages]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                yield _messages(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                wanted = "`messages` with one of the user's, or `problem` or `prompt` as text"
                raise UserError(f"{path}:{number}: needs {wanted} ({error})") from error


def _messages(row: dict[str, Any]) -> Messages:
    """The chat up to the last message of the user; `ValueError` says what is wrong."""
    if row.get("messages") is None:
        text = row.get("problem") or row["prompt"]
        if not isinstance(text, str):
            raise ValueError("not text")
        return [{"role": "user", "content": text}]
    chat = [{"role": str(message["role"]), "content": message["content"]} for message in row["messages"]]
    users = [place for place, message in enumerate(chat) if message["role"] == "user"]
    if not users or not all(isinstance(message["content"], str) for message in chat):
        raise ValueError("no message of the user" if not users else "content that is not text")
    return chat[: users[-1] + 1]
