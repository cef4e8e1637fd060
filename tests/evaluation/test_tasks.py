"""Every task gives the problems it promises, and says in one line what it misses."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import corpus, tasks
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.models import encode_prompt

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "assets" / "qwen3-tiny-math")


@pytest.fixture
def words_tokenizer():
    """A tokenizer of whole words and single digits without a chat template, for running text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<unk>", *"0123456789", "the", "whale", "sea", ".", ",", "The", "pass", "key", "is"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d|[A-Za-z]+|[.,?]|\s+"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.core
def test_the_registry_finds_every_task_file_and_names_the_known_ones():
    assert set(tasks.names()) >= {
        "tiny_math", "lm", "passkey", "gsm8k", "math500", "aime24", "aime25", "hmmt_feb_2025",
    }  # fmt: skip
    with pytest.raises(UserError, match=r"unknown task 'aime26'.*aime25"):
        tasks.get("aime26")


def write_rows(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_benchmark_is_read_from_a_folder_and_graded(tmp_path):
    rows = [{"id": f"a-{i}", "problem": f"What is {i} / 2?", "answer": rf"\frac{{{i}}}{{2}}"} for i in (1, 3, 5)]
    write_rows(tmp_path, "aime25.jsonl", rows)
    task = tasks.get("aime25")
    settings = EvalSettings(data_dir=str(tmp_path), problems=2)
    first, second = task.problems(settings, None)
    assert (first.id, second.id) == ("a-1", "a-3")
    assert first.prompt.startswith("What is 1 / 2?") and "\\boxed{}" in first.prompt
    assert task.grade(first, "<think>2?</think> So it is \\boxed{0.5}.").score == 1.0
    assert task.grade(second, "\\boxed{1.4}").score == 0.0
    assert task.grade(second, "").extracted is None
    assert task.context(settings) == 16384


def test_a_missing_file_names_the_file_and_the_option(tmp_path):
    with pytest.raises(UserError, match=r"gsm8k: no file .*gsm8k_test\.jsonl; data_dir"):
        tasks.get("gsm8k").check(EvalSettings(data_dir=str(tmp_path)))


def test_a_bad_row_is_named_by_its_number(tmp_path):
    write_rows(tmp_path, "aime24.jsonl", [{"id": "1", "problem": "p", "answer": "1"}, {"id": "2", "problem": "p"}])
    with pytest.raises(UserError, match=r"aime24\.jsonl: row 2 has no field 'answer'"):
        tasks.get("aime24").check(EvalSettings(data_dir=str(tmp_path)))
    for second, message in [
        ({"id": "1", "problem": "another", "answer": "1"}, "row 2: a second problem with id '1'"),
        ({"id": "2", "problem": " ", "answer": "1"}, "row 2: 'problem' must be text, not ' '"),
    ]:
        write_rows(tmp_path, "aime24.jsonl", [{"id": "1", "problem": "p", "answer": "1"}, second])
        with pytest.raises(UserError, match=rf"aime24\.jsonl: {message}"):
            tasks.get("aime24").check(EvalSettings(data_dir=str(tmp_path)))
    (tmp_path / "math500.jsonl").write_text("{not json\n")
    with pytest.raises(UserError, match=r"math500\.jsonl: line 1 is not JSON"):
        tasks.get("math500").check(EvalSettings(data_dir=str(tmp_path)))


@pytest.mark.core
def test_tiny_math_prompts_are_those_of_training_and_grades_are_exact(tokenizer):
    from kvpop_jax.evaluation.tasks import tiny_math

    task = tasks.get("tiny_math")
    settings = EvalSettings(problems=3, families=("mixed",))
    problems = task.problems(settings, tokenizer)
    assert [problem.group for problem in problems] == ["mixed"] * 3
    source = tiny_math.generate(0, seed=0, split="test", families=("mixed",))
    assert tokenizer.decode(encode_prompt(tokenizer, problems[0].prompt)) == tiny_math.prompt_text(source.prompt)
    assert task.grade(problems[0], source.solution).score == 1.0
    assert task.grade(problems[1], source.solution.rsplit("\n", 1)[0]).score == 0.0
    assert len(tokenizer.encode(source.solution)) <= task.max_new_tokens(settings)


def test_tiny_math_refuses_an_unknown_family_before_any_model_is_loaded():
    with pytest.raises(UserError, match="nonesuch"):
        tasks.get("tiny_math").check(EvalSettings(families=("nonesuch",)))


@pytest.mark.parametrize("with_text", [False, True])
def test_a_pass_key_prompt_fills_its_length_and_hides_the_key_at_its_depth(words_tokenizer, tmp_path, with_text):
    text = tmp_path / "sea.txt"
    text.write_text("The whale is in the sea . The sea is the whale , the whale is the sea . " * 300)
    settings = EvalSettings(
        lengths=(256, 512), depths=(0.0, 0.5, 1.0), problems=12, text=str(text) if with_text else None
    )
    task = tasks.get("passkey")
    problems = task.problems(settings, words_tokenizer)
    assert len({problem.id for problem in problems}) == 12
    assert len({problem.answer for problem in problems}) == 12
    for problem in problems:
        length, depth = (float(part) for part in problem.id.split("-")[:2])
        tokens = encode_prompt(words_tokenizer, problem.prompt)
        assert 0.9 * length < len(tokens) <= length
        place = problem.prompt.index(problem.answer) / len(problem.prompt)
        assert abs(place - depth) < 0.4
        assert task.grade(problem, f"The key is {problem.answer}.").score == 1.0
        assert task.grade(problem, "The key is 12345678.").score == 0.0
    assert task.problems(settings, words_tokenizer) == problems


def test_a_length_too_short_for_the_question_is_refused(words_tokenizer):
    with pytest.raises(UserError, match="lengths: 64 tokens"):
        tasks.get("passkey").problems(EvalSettings(lengths=(64,)), words_tokenizer)


def test_text_windows_have_their_length_and_come_from_all_files(words_tokenizer, tmp_path):
    (tmp_path / "longtext").mkdir()
    for name in ("a", "b"):
        (tmp_path / "longtext" / f"{name}.txt").write_text(f"The {name} whale is\nin the sea .\n\n" * 400)
    settings = EvalSettings(data_dir=str(tmp_path), lengths=(64, 128), problems=5, prefix=0.25)
    windows = tasks.get("lm").windows(settings, words_tokenizer)
    assert [len(window.tokens) for window in windows] == [64] * 5 + [128] * 5
    assert {window.prefix for window in windows if len(window.tokens) == 128} == {32}
    assert [window.id[0] for window in windows[:5]] == ["a", "a", "a", "b", "b"]
    assert len({window.id for window in windows}) == 10


def test_text_that_is_missing_or_too_short_is_named(words_tokenizer, tmp_path):
    with pytest.raises(UserError, match="lm needs text: --text FILE"):
        tasks.get("lm").check(EvalSettings())
    with pytest.raises(UserError, match="longtext"):
        tasks.get("lm").check(EvalSettings(data_dir=str(tmp_path)))
    short = tmp_path / "short.txt"
    short.write_text("The sea .")
    with pytest.raises(UserError, match="fewer than 1024"):
        tasks.get("lm").windows(EvalSettings(text=str(short)), words_tokenizer)


def test_line_breaks_inside_paragraphs_become_spaces(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(b"one\r\ntwo\r\n\r\nthree")
    assert corpus.read_text(path) == "one two\n\nthree"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        corpus.read_text(path)
