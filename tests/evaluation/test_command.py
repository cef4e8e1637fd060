"""The command line of eval.py: what it takes, and the one line it prints when something is wrong."""

from pathlib import Path

import pytest

from kvpop_jax import policies
from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import tasks
from kvpop_jax.evaluation.command import check, main, parse_command

ROOT = Path(__file__).parents[2]


@pytest.mark.core
def test_list_prints_one_policy_or_task_a_line(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {"policy": policies.names(), "task": tasks.names(), "group": tasks.groups()}
    assert lines == [f"{kind} {name}" for kind, names in listed.items() for name in names]
    assert {"policy kvpop", "policy dense", "task tiny_math", "task ruler_vt", "group ruler"} <= set(lines)


def test_comma_lists_and_a_config_file_are_read_and_the_command_line_wins(tmp_path):
    config = tmp_path / "eval.yaml"
    config.write_text("model: somewhere\npolicies: [dense, tova]\nbudgets: [64]\nlengths: [128, 256]\nseed: 3\n")
    command = parse_command(
        ["--config", str(config), "--budgets", "128,256", "--tasks", "lm,passkey", "--scorer", "a,b"]
    )
    assert (command.model, command.policies, command.budgets) == ("somewhere", ("dense", "tova"), (128, 256))
    assert (command.tasks, command.scorer) == (("lm", "passkey"), ("a", "b"))
    assert (command.lengths, command.seed) == ((128, 256), 3)


@pytest.mark.parametrize("trained", ["nothing", "scorer", "model and scorer"])
def test_a_training_config_stands_for_what_the_training_left(tmp_path, trained):
    config = tmp_path / "train.yaml"
    config.write_text(
        f"name: run\noutput_dir: {tmp_path}\nmethod: distill\nmodel: {{source: base}}\ndtype: float32\n"
        "eval: {policies: [dense, kvpop], budgets: [64], problems: 7, families: [mixed]}\n"
    )
    export = tmp_path / "run" / "export"
    export.mkdir(parents=True)
    for part, file in (("scorer", "scorer.json"), ("model", "config.json")):
        if part in trained:
            (export / file).write_text("{}")
    command = parse_command([f"--config={config}", "--problems", "9"])
    assert command.model == (str(export) if "model" in trained else "base")
    assert command.scorer == ((str(export),) if "scorer" in trained else ())
    assert (command.policies, command.problems, command.families) == (("dense", "kvpop"), 9, ("mixed",))
    assert command.output == str(tmp_path / "run" / "eval")
    assert (command.dtype, command.pin_prompt) == ("float32", False)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "m", "--policies", "nonesuch"], "unknown policy 'nonesuch'; the policies are .*tova"),
        (["--model", "m", "--policies", "dense", "--tasks", "nonesuch"], "unknown task 'nonesuch'; the tasks are .*lm"),
        (["--model", "m", "--policies", "kvpop", "--tasks", "tiny_math"], "kvpop needs a trained scorer.*--scorer"),
        (["--model", "m", "--policies", "dense", "--tasks", "lm"], "lm needs text"),
        (["--policies", "dense"], "model is missing"),
        (["--model", "m", "--policies", "dense", "--prompt", ""], "prompt is empty"),
        (["--model", "m", "--policies", "dense", "--prompt", " \n"], "prompt is empty"),
        (["--model", "m", "--policies", "dense", "--output", __file__], "output: .* is a file; name a folder"),
        (["--model", "m", "--nonesuch", "1"], "--nonesuch"),
        (["--model", "m", "--budgets", "many"], "budgets"),
        (["--model", "m", "--budgets", "0"], "budgets must be different positive numbers"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_mistake_is_one_line_that_names_it_before_any_model_is_loaded(argv, message):
    with pytest.raises(UserError, match=message) as raised:
        check(parse_command(argv))
    assert "\n" not in str(raised.value)


def test_an_unknown_key_in_a_config_file_is_named(tmp_path):
    config = tmp_path / "eval.yaml"
    config.write_text("model: m\npolicys: [dense]\n")
    with pytest.raises(UserError, match="policys"):
        parse_command(["--config", str(config)])


def test_every_preset_can_be_given_to_eval():
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        if path.stem.startswith("polykv_"):  # of calibrate.py
            continue
        command = parse_command(["--config", str(path), "--model", "any"])
        assert set(command.policies) <= set(policies.names()), path
        assert set(command.tasks) <= set(tasks.names()), path
