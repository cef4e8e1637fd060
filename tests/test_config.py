"""Configurations: what is refused, how it is said, and that `--help` explains everything."""

import dataclasses
import os
import signal
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from kvpop_jax import cli
from kvpop_jax.config import TrainConfig
from kvpop_jax.errors import UserError
from kvpop_jax.polykv.settings import CalibrateSettings

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
LEAST = ["--name", "x", "--model.source", "somewhere"]


def _fields(cls, prefix=""):
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _fields(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _refusal(*arguments):
    with pytest.raises(UserError) as caught:
        cli.parse(TrainConfig, [*LEAST, *arguments])
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.core
def test_the_command_line_overrides_the_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("name: a\nsteps: 3\nmodel: {source: m}\npolicy: {budgets: [512, 300], window: 100}\n")
    config = cli.parse(TrainConfig, ["--config", str(file), "--policy.window", "50", "--name=b"])
    assert (config.name, config.steps, config.policy.window, config.policy.budgets) == ("b", 3, 50, (512, 300))
    assert config.policy.sinks == 4  # untouched fields of a section keep their defaults


def test_a_configuration_survives_being_written_and_read():
    config = cli.parse(TrainConfig, [*LEAST, "--policy.budgets", "512,300", "--eval.depths", "0.25,1"])
    assert config.policy.budgets == (512, 300)
    assert config.eval.depths == (0.25, 1.0)


@pytest.mark.parametrize("budgets", ["512,300", "[512, 300]"])
def test_lists_are_written_with_or_without_brackets(budgets, tmp_path):
    config = cli.parse(TrainConfig, [*LEAST, f"--policy.budgets={budgets}"])
    file = tmp_path / "c.yaml"
    file.write_text(cli.to_yaml(config))
    assert cli.parse(TrainConfig, ["--config", str(file)]) == config


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_preset_is_valid(config):
    # Presets for a user's own data leave the paths to the command line.
    if config.stem.startswith("polykv_"):
        cli.parse(CalibrateSettings, ["--config", str(config), "--paths", "rows.jsonl"])
    else:
        cli.parse(TrainConfig, ["--config", str(config), "--data.paths", "rows.jsonl"])


@pytest.mark.core
def test_an_unknown_option_is_named():
    assert "--polcy.window" in _refusal("--polcy.window", "3")


def test_an_unknown_key_of_a_file_is_named(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("policy: {windw: 3}\n")
    assert "windw" in _refusal("--config", str(file))


def test_a_missing_or_broken_file_is_named(tmp_path):
    assert "nowhere.yaml" in _refusal("--config", "nowhere.yaml")
    file = tmp_path / "c.yaml"
    file.write_text("policy: [\n")
    assert "config" in _refusal("--config", str(file))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", "many"),
        ("policy.budgets", "300,x"),
        ("method", "train"),
        ("eval.budgets", "3.5"),
        ("remat", "perhaps"),
    ],
)
def test_an_ill_typed_value_is_named(field, value):
    message = _refusal(f"--{field}", value)
    assert field in message
    assert value.split(",")[-1] in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy.budgets", "200"),
        ("policy.window", "0"),
        ("steps", "0"),
        ("accumulate", "7"),
        ("losses.target.query_share", "0"),
        ("data.workers", "-1"),
        ("checkpoint.keep", "0"),
        ("name", "a/b"),
    ],
)
def test_an_impossible_value_is_named(field, value):
    message = _refusal(f"--{field}", value)
    assert field in message
    assert value in message


def test_combinations_without_sense_are_refused():
    assert "freeze_base" in _refusal("--method", "pretrain", "--freeze_base", "true")
    with pytest.raises(UserError, match=r"model\.source"):
        cli.parse(TrainConfig, ["--name", "x", "--model.tokenizer", "t"])


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.parse(TrainConfig, ["--help"])
    assert exit_.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(lines) if line == "options:")
    text = "\n".join(lines[start:])
    for field in _fields(TrainConfig):
        entry = text.partition(f"\n  --{field} ")[2].partition("\n  --")[0]
        words = entry.partition("(type:")[0].partition("(required")[0].split()
        assert len(words) >= 3, f"{field} is not explained"


@pytest.mark.core
def test_a_user_error_becomes_one_line_and_exit_code_2(capsys):
    def refuse(argv):
        raise UserError("the file is wrong")

    with pytest.raises(SystemExit) as exit_:
        cli.run(refuse)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: the file is wrong\n"


def test_ctrl_c_that_nothing_answers_is_one_line(capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit_:
        cli.run(interrupted)
    assert exit_.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


def test_sigterm_ends_a_script_as_ctrl_c_does_with_its_own_code(capsys):
    before = signal.getsignal(signal.SIGTERM)

    def terminated(argv):
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as exit_:
        cli.run(terminated)
    assert exit_.value.code == 143
    assert capsys.readouterr().err == "stopped\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_reader_that_went_away_ends_a_script_without_a_traceback():
    script = "from kvpop_jax import cli\ncli.run(lambda argv: print('line\\n' * 100_000) or 0)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_an_output_folder_that_cannot_be_written_is_named_and_nothing_is_made(tmp_path, monkeypatch):
    cli.check_output(tmp_path / "new" / "run", "output")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output: .*/file is a file; name a folder"):
        cli.check_output(tmp_path / "file" / "run", "output")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write to what others may not
    with pytest.raises(UserError, match=rf"output: {tmp_path} cannot be written to"):
        cli.check_output(tmp_path / "new", "output")


def test_differences_name_the_field():
    old, new = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5}, "e": 4}
    assert list(cli.differences(old, new)) == ["a.c: 2, now 5", "d: 3, now None", "e: None, now 4"]
