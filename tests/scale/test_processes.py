"""Runs over several devices and processes, and killed ones: they end as if nothing had happened."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scale.tiny_run import losses, save_base, stateless, write_config

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.multiprocess


def _start(arguments, log, devices=1):
    """A process of the repository's own scripts, with so many CPU devices; it writes to `log`."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | flags, stdout=log.open("ab"), stderr=subprocess.STDOUT
    )


def _finish(processes, logs):
    """Waits for them to end well; none outlives a failure."""
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=600) == 0, log.read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()


def _train(config, log):
    write_config(config, log.with_suffix(".yaml"))
    return _start(["train.py", "--config", str(log.with_suffix(".yaml"))], log)


def test_losses_on_every_mesh_equal_those_of_one_device(tmp_path):
    log = tmp_path / "log"
    process = _start([str(Path(__file__).with_name("mesh_losses.py")), str(tmp_path), "stateless"], log, devices=8)
    _finish([process], [log])
    found = json.loads(log.read_text().splitlines()[-1])
    one = found.pop("one")
    assert set(found) == {"data", "fsdp", "model", "mixed"}
    for mesh, steps in found.items():
        for step, (got, wanted) in enumerate(zip(steps, one, strict=True)):
            for name, value in wanted.items():
                # A KL of 1e-6 is a difference of numbers near 5: what rounding leaves of it is 1e-7.
                np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-7, err_msg=f"{mesh}, {step}, {name}")
    assert one[0]["loss"] != one[-1]["loss"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    save_base(folder)
    return folder


def _pair(config, folder, port):
    """Two processes of one run, a device each."""
    folder.mkdir(exist_ok=True)
    write_config(config, folder / "config.yaml")
    logs = [folder / f"log{index}" for index in range(2)]
    shared = ["train.py", "--config", str(folder / "config.yaml"), "--mesh.data", "2", "--processes.count", "2"]
    shared += ["--processes.coordinator", f"127.0.0.1:{port}", "--processes.index"]
    return [_start([*shared, str(index)], log) for index, log in enumerate(logs)], logs


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(path, process, log):
    while not path.exists():
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.02)


def test_two_processes_go_on_after_one_was_killed(base, tmp_path):
    whole = stateless(base, tmp_path / "whole", steps=6, freeze_base=True)
    process = _train(whole, tmp_path / "log")
    _finish([process], [tmp_path / "log"])

    config = replace(whole, output_dir=str(tmp_path / "pair"), evaluate=True)
    pair, logs = _pair(config, tmp_path / "pair", _free_port())
    try:
        _wait_for(tmp_path / "pair" / "run" / "checkpoints" / "2", pair[0], logs[0])
    finally:
        pair[1].kill()
        pair[0].kill()  # it waits for the other one; a scheduler ends both
    assert [process.wait() for process in pair] == [-signal.SIGKILL] * 2
    assert not (tmp_path / "pair" / "run" / "export").exists()
    _finish(*_pair(config, tmp_path / "pair", _free_port()))
    assert "resuming" in logs[0].read_text()

    found, wanted = losses(tmp_path / "pair"), losses(tmp_path / "whole")
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose([loss for _, loss in found], [loss for _, loss in wanted], rtol=1e-5)
    # Both evaluated, each its own problem, and the first wrote the results of all.
    results = tmp_path / "pair" / "run" / "eval"
    assert sorted(path.name for path in results.glob("rollouts*.jsonl")) == ["rollouts-1.jsonl", "rollouts.jsonl"]
    content = json.loads((results / "results.json").read_text())
    assert content["complete"] and [row["n"] for row in content["rows"] if not row["group"]] == [2]


def test_a_run_that_is_killed_twice_loses_no_saved_step(tmp_path):
    log = tmp_path / "log"
    _finish([_start(["tools/kill_test.py", "--kills", "2", "--steps", "60"], log)], [log])
    assert "killed 2 times" in log.read_text() and "60 losses, equal to" in log.read_text()
