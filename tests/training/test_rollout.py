"""Method rollout: the model writes data that a training reads; a stopped run goes on, and bad prompts are named."""

import json

import pytest
from scale.tiny_run import save_base

from kvpop_jax.config import DataConfig, ModelSource, RolloutConfig, TrainConfig
from kvpop_jax.errors import UserError
from kvpop_jax.training import loop
from kvpop_jax.training.sources import open_source


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    save_base(folder)
    return folder


def _config(base, folder, prompts):
    settings = RolloutConfig(prompts=(str(prompts),), per_prompt=2, rows=4, max_new_tokens=8, temperature=2.0, top_k=0)
    return TrainConfig(
        name="run", output_dir=str(folder), method="rollout", model=ModelSource(source=str(base)), rollout=settings
    )


def _rows(*folders):
    files = [file for folder in folders for file in sorted(folder.glob("*.jsonl"))]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_rollouts_are_chats_that_training_reads_and_a_stopped_run_writes_the_rest(base, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "take 1 2 3"}, {"role": "assistant", "content": "dropped"}]
    prompts.write_text("\n".join(map(json.dumps, [{"messages": chat}, {"problem": "take 4"}, {"prompt": "take 5 6"}])))
    config = _config(base, tmp_path, prompts)
    assert loop.run(config) == 0
    kept, cut = tmp_path / "run" / "rollouts", tmp_path / "run" / "rollouts_cut"
    rows = _rows(kept, cut)
    assert len({row["key"] for row in rows}) == len(rows) == 6
    asked = sorted(row["messages"][0]["content"] for row in rows)
    assert asked == ["take 1 2 3"] * 2 + ["take 4"] * 2 + ["take 5 6"] * 2
    assert all([message["role"] for message in row["messages"]] == ["user", "assistant"] for row in rows)
    assert all(row["finish_reason"] == "length" and row["tokens"] == 8 for row in _rows(cut))
    source = open_source(DataConfig(paths=(str(cut),)), seed=0)
    assert source[0].messages[-1]["content"] == _rows(cut)[0]["messages"][-1]["content"]

    file = cut / "part-0.jsonl"
    whole = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole[:1]) + whole[1][:20])  # killed while it wrote the second
    assert loop.run(config) == 0
    assert sorted(row["key"] for row in _rows(kept, cut)) == sorted(row["key"] for row in rows)
    assert sorted(file.read_text().splitlines(keepends=True)) == sorted(whole)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "prompts.jsonl:1"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no message of the user"),
        ('{"question": "a"}', "'prompt'"),
        ("\n", r"rollout\.prompts: no prompts in .*prompts\.jsonl"),
    ],
)
def test_a_bad_prompt_is_named_by_file_and_line(base, tmp_path, line, says):
    (tmp_path / "prompts.jsonl").write_text(line)
    with pytest.raises(UserError, match=says):
        loop.run(_config(base, tmp_path, tmp_path / "prompts.jsonl"))


def test_a_benchmark_is_not_answered_for_training(base, tmp_path):
    """A folder of task files has rows that prompts could be read from."""
    (tmp_path / "aime24.jsonl").write_text('{"id": 1, "problem": "take 1 2 3", "answer": "6"}')
    with pytest.raises(UserError, match=r"rollout\.prompts: .*aime24\.jsonl is named as a benchmark's"):
        loop.run(_config(base, tmp_path, tmp_path))
