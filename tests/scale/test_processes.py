"""A run over two processes that are killed ends as if nothing had happened."""

import json
import signal
import socket
import time
from dataclasses import replace

import numpy as np
import pytest
from scale.scripts import finish, start
from scale.tiny_run import losses, save_base, stateless, write_config

from kvpop_jax.training import loop

pytestmark = pytest.mark.multiprocess


def _pair(config, folder, port):
    """Two processes of one run, a device each."""
    folder.mkdir(exist_ok=True)
    write_config(config, folder / "config.yaml")
    logs = [folder / f"log{index}" for index in range(2)]
    shared = ["train.py", "--config", str(folder / "config.yaml"), "--mesh.data", "2", "--processes.count", "2"]
    shared += ["--processes.coordinator", f"127.0.0.1:{port}", "--processes.index"]
    return [start([*shared, str(index)], log) for index, log in enumerate(logs)], logs


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(path, process, log):
    while not path.exists():
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.02)


def test_two_processes_go_on_after_one_was_killed(tmp_path):
    save_base(tmp_path / "base")
    whole = stateless(tmp_path / "base", tmp_path / "whole", steps=6, freeze_base=True)
    assert loop.run(whole) == 0  # here: a process more would take longer to start than to train

    config = replace(whole, output_dir=str(tmp_path / "pair"), evaluate=True)
    pair, logs = _pair(config, tmp_path / "pair", _free_port())
    try:
        _wait_for(tmp_path / "pair" / "run" / "checkpoints" / "2", pair[0], logs[0])
    finally:
        pair[1].kill()
        pair[0].kill()  # it waits for the other one; a scheduler ends both
    assert [process.wait() for process in pair] == [-signal.SIGKILL] * 2
    assert not (tmp_path / "pair" / "run" / "export").exists()
    finish(*_pair(config, tmp_path / "pair", _free_port()))
    assert "resuming" in logs[0].read_text()

    found, wanted = losses(tmp_path / "pair"), losses(tmp_path / "whole")
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose([loss for _, loss in found], [loss for _, loss in wanted], rtol=1e-5)
    # Both evaluated, each its own problem, and the first wrote the results of all.
    results = tmp_path / "pair" / "run" / "eval"
    assert sorted(path.name for path in results.glob("rollouts*.jsonl")) == ["rollouts-1.jsonl", "rollouts.jsonl"]
    content = json.loads((results / "results.json").read_text())
    assert content["complete"] and [row["n"] for row in content["rows"] if not row["group"]] == [2]


def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(tmp_path):
    save_base(tmp_path / "base")
    endless = stateless(tmp_path / "base", tmp_path / "pair", steps=100_000, freeze_base=True)
    pair, logs = _pair(endless, tmp_path / "pair", _free_port())
    _wait_for(tmp_path / "pair" / "run" / "checkpoints" / "2", pair[0], logs[0])
    pair[1].send_signal(signal.SIGTERM)
    finish(pair, logs)
    for log in logs:
        assert "stopped by SIGTERM; the same command resumes" in log.read_text()
    last = losses(tmp_path / "pair")[-1][0]
    saved = [int(path.name) for path in (tmp_path / "pair" / "run" / "checkpoints").iterdir() if path.name.isdigit()]
    assert max(saved) == last < 100_000 and not (tmp_path / "pair" / "run" / "export").exists()
