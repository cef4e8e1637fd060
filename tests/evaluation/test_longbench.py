# ruff: noqa: RUF001 (Chinese punctuation)
"""LongBench's tasks read their files, put them in their prompts, and score as worked out by hand."""

import importlib.util
import json
import zipfile
from pathlib import Path

import pytest

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import tasks
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks.base import encode_problem
from kvpop_jax.evaluation.tasks.longbench import cut_middle, metrics
from kvpop_jax.evaluation.tasks.longbench.datasets import DATASETS

NAMES = tuple(dataset.name for dataset in DATASETS)
REFERENCES = {
    "f1": "Rural France",
    "f1_zh": "厦门大学。",
    "rouge_l": "The camp was cleared. Nobody was hurt.",
    "rouge_l_zh": "会议通过了新的计划",
    "accuracy": "Date",
    "retrieval": "Paragraph 7",
    "count": "12",
    "edit_similarity": "return self.value",
}
needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("jieba", "rouge")), reason="the extra longbench is missing"
)


class Words:
    """A tokenizer of words between single spaces, whose chat template names the turns."""

    chat_template = "yes"

    def __init__(self):
        self.vocabulary: list[str] = []

    def __call__(self, text, add_special_tokens=True):
        words = text.split(" ")
        self.vocabulary += [word for word in dict.fromkeys(words) if word not in self.vocabulary]
        return {"input_ids": [self.vocabulary.index(word) for word in words]}

    def decode(self, tokens, skip_special_tokens):
        return " ".join(self.vocabulary[token] for token in tokens)

    def apply_chat_template(self, turns, add_generation_prompt, tokenize, enable_thinking=True):
        return f"user: {turns[0]['content']} assistant:{' <think>' if enable_thinking else ''}"


def write(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def row(name: str, **more) -> dict:
    """A row in the official form."""
    metric = next(dataset.metric for dataset in DATASETS if dataset.name == name)
    classes = ["Date", "Person", "Dates of birth"] if metric == "accuracy" else None
    return {
        "input": "the {question}", "context": "some {long} text", "answers": [REFERENCES[metric]], "length": 3,
        "dataset": name, "language": "en", "all_classes": classes, "_id": f"id of {name}",
    } | more  # fmt: skip


def test_the_group_stands_for_the_twenty_one_tasks():
    assert tasks.groups()["longbench"] == tuple(f"longbench_{name}" for name in NAMES)
    assert len(NAMES) == 21


@needs_packages
@pytest.mark.parametrize("name", NAMES)
def test_a_task_reads_its_file_and_scores_its_own_answer_one(name, tmp_path):
    write(tmp_path, f"{name}.jsonl", [row(name), row(name, _id="second")])
    task = tasks.get(f"longbench_{name}")
    settings = EvalSettings(data_dir=str(tmp_path), problems=1)
    task.check(settings)
    (problem,) = task.problems(settings, None)
    assert problem.id == f"id of {name}"
    assert "some {long} text" in problem.prompt
    asks = "{input}" in next(dataset.prompt for dataset in DATASETS if dataset.name == name)
    assert ("the {question}" in problem.prompt) == asks
    (answer,) = json.loads(problem.answer)["answers"]
    assert task.grade(problem, answer).score == pytest.approx(1.0, abs=1e-6)
    assert task.grade(problem, "").score == 0.0
    tokens = encode_problem(tokenizer := Words(), problem)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    few_shot = name in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
    assert text == (problem.prompt if few_shot else f"user: {problem.prompt} assistant:")


@needs_packages
def test_the_best_answer_counts_and_of_few_shot_tasks_the_first_line(tmp_path):
    write(tmp_path, "triviaqa.jsonl", [row("triviaqa", answers=["Paris", "the City of Paris"])])
    write(tmp_path, "hotpotqa.jsonl", [row("hotpotqa", answers=["Paris"])])
    settings = EvalSettings(data_dir=str(tmp_path))
    for name, score in (("triviaqa", 1.0), ("hotpotqa", 2 * (1 / 3) / (1 / 3 + 1))):
        task = tasks.get(f"longbench_{name}")
        (problem,) = task.problems(settings, None)
        assert task.grade(problem, "\nParis\nQuestion: Who").score == pytest.approx(score)


@pytest.mark.core
def test_f1_is_that_of_normalised_words():
    assert metrics.f1("The cat, sat!", "a cat sat down") == pytest.approx(2 * 1 * (2 / 3) / (1 + 2 / 3))
    assert metrics.f1("no", "yes") == 0.0


@needs_packages
def test_chinese_f1_counts_words_without_punctuation():
    # jieba cuts the reference into 我 / 来到 / 北京 / 清华大学 and the answer into 北京 / 清华大学.
    assert metrics.f1_zh("北京，清华大学。", "我来到北京清华大学") == pytest.approx(2 * 1 * 0.5 / 1.5)


@needs_packages
def test_rouge_l_is_the_packages_f():
    # The longest common subsequence of "the cat sat" and "the cat on the mat" is "the cat"; the package counts
    # different words, so precision is 2 of 3 and recall 2 of 4.
    assert metrics.rouge_l("the cat sat", "the cat on the mat") == pytest.approx(2 * (2 / 3) / 2 / (2 / 3 + 1 / 2))
    assert metrics.rouge_l("", "x") == metrics.rouge_l("...", "x") == 0.0
    assert metrics.rouge_l_zh("我来到北京", "我来到北京清华大学") == pytest.approx(2 * 0.75 / 1.75)


@needs_packages
def test_rouge_of_long_texts_is_no_recursion_error():
    words = list(map(str, range(600)))
    others = [f"other {word}" for word in words[:400]]
    assert metrics.rouge_l(" ".join(words), " ".join([*others, "599"])) > 0


def test_classes_share_the_score_and_a_part_of_the_right_name_does_not_count():
    classes = ("Date", "Dates of birth", "Person")
    assert metrics.accuracy("Person or Date", "Person", classes) == 0.5
    assert metrics.accuracy("Dates of birth", "Dates of birth", classes) == 1.0
    assert metrics.accuracy("Date", "Person", classes) == 0.0


def test_numbers_are_counted():
    assert metrics.retrieval("Paragraph 7, or 8 or 7", "Paragraph 7") == pytest.approx(2 / 3)
    assert metrics.retrieval("段落27", "段落27") == 1.0
    assert metrics.count("12 of 13", "12") == 0.5
    assert metrics.count("none", "12") == 0.0


def test_code_is_compared_on_its_first_line():
    assert metrics.edit_similarity("```python\n# next\nreturn self.value\nx", "return self.value") == 1.0
    # "abcd" and "abef" share "ab": 2 * 2 of 8 letters.
    assert metrics.edit_similarity("abcd", "abef") == 0.5
    assert metrics.edit_similarity("```", "x") == 0.0


def test_a_long_prompt_loses_its_middle(tmp_path):
    tokenizer = Words()
    text = " ".join(map(str, range(20)))
    assert cut_middle(tokenizer, text, 20) == text
    assert cut_middle(tokenizer, text, 7) == "0 1 217 18 19"
    write(tmp_path, "lcc.jsonl", [row("lcc", context=text)])
    settings = EvalSettings(data_dir=str(tmp_path), max_prompt_tokens=12)
    task = tasks.get("longbench_lcc")
    (problem,) = task.problems(settings, tokenizer)
    assert problem.prompt.startswith("Please complete the code given below.") and problem.prompt.endswith("of code:\n")
    assert len(tokenizer(problem.prompt)["input_ids"]) <= 12
    assert (task.context(settings), task.context(EvalSettings())) == (12, 8192)


def test_rows_come_from_the_hub_s_archive_without_a_folder(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/lcc.jsonl", json.dumps(row("lcc")))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args, **more: str(tmp_path / "data.zip"))
    assert [problem.id for problem in tasks.get("longbench_lcc").problems(EvalSettings(), None)] == ["id of lcc"]
    with pytest.raises(UserError, match=r"does not hold data/trec\.jsonl"):
        tasks.get("longbench_trec").problems(EvalSettings(), None)


def test_what_is_missing_is_named_in_one_line(tmp_path, monkeypatch):
    settings = EvalSettings(data_dir=str(tmp_path))
    write(tmp_path, "longbench_qasper_e.jsonl", [row("qasper")])
    with pytest.raises(UserError, match=r"longbench_qasper: no file .*qasper\.jsonl; data_dir must hold it"):
        tasks.get("longbench_qasper").check(settings)
    for name in ("trec.jsonl", "trec_20.jsonl"):
        write(tmp_path, name, [row("trec")])
    with pytest.raises(UserError, match=r"longbench_trec: .*trec\.jsonl and trec_20\.jsonl are both of the task"):
        tasks.get("longbench_trec").check(settings)
    (tmp_path / "lcc.jsonl").write_text('{"context": "x"}\n')
    with pytest.raises(UserError, match=r"lcc\.jsonl: row 1 has no field 'input'"):
        tasks.get("longbench_lcc").problems(settings, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"longbench_qmsum: .* needs rouge; `pip install 'kvpop-jax\[longbench\]'`"):
        tasks.get("longbench_qmsum").check(settings)


@needs_packages
@pytest.mark.parametrize("name", ["multi_news", "multifieldqa_zh", "passage_retrieval_zh"])
def test_real_files_load_and_their_own_answers_score_one(name):
    data = Path(__file__).parents[3] / "shared" / "data"
    if not data.is_dir():
        pytest.skip(f"no folder {data}")
    task = tasks.get(f"longbench_{name}")
    settings = EvalSettings(data_dir=str(data), problems=4)
    task.check(settings)
    problems = task.problems(settings, None)
    assert len({problem.id for problem in problems}) == 4
    for problem in problems:
        assert len(problem.prompt) > 2000
        answer = json.loads(problem.answer)["answers"][0]
        assert task.grade(problem, answer).score == pytest.approx(1.0, abs=1e-6)
        assert task.grade(problem, "").score == 0.0
