"""tiny_math: every answer is re-derived from the prompt's text, and the claims about look-back are measured."""

import re
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.tasks import tiny_math

TOKENIZER_FOLDER = Path(__file__).resolve().parents[2] / "assets" / "qwen3-tiny-math"
VALUE = re.compile(r"^(\w+) = (\d) (\d) (\d)$")
DIGIT_LINE = re.compile(r"^([uth]) (\d) ([-+*]) (\d) ([-+]) (\d) = (\d) (carry|borrow) (\d)$")
HEADER = re.compile(r"^(?:(red|blue|green|amber|add) )?(s\d+) (:|last) (.+)$")
ANSWER_LINE = re.compile(r"^answer : \d \d \d$")


def problems(family: str, count: int, **lengths: int) -> list[tiny_math.Problem]:
    return [tiny_math.generate(i, seed=7, split="test", families=(family,), **lengths) for i in range(count)]


# ---------------------------------------------------------------------------------------------- independent solver


def to_number(*digits: str) -> int:
    return int("".join(digits))


def solve(prompt: str) -> str:
    """The answer of a problem of any family, from its prompt alone."""
    lines = prompt.split("\n")
    values = {m[1]: to_number(*m.groups()[1:]) for line in lines if (m := VALUE.match(line))}
    assert len(values) == sum(VALUE.match(line) is not None for line in lines), "a name is given twice"
    entries = [m for line in lines if (m := HEADER.match(line))]
    kind = lines[0].split()[1] if lines[0].startswith("sum") else None
    program = {int(m[2][1:]): m for m in entries if m[1] == kind}
    first = int(re.search(r"from s(\d+)", lines[0])[1])
    assert sorted(program) == list(range(first, first + len(program)))
    assert [label for label, m in program.items() if m[3] == "last"] == [max(program)]
    defined: list[str] = []
    for label in sorted(program):
        match program[label][4].split():
            case [a, b, c]:
                values["total"] += to_number(a, b, c)
            case ["add", name]:
                values["total"] += values[name]
            case ["take", name]:
                values["total"] -= values[name]
            case [_, "at", a, b, c, "*", *quantity]:
                values["total"] += to_number(a, b, c) * to_number(*quantity)
            case [name, "=", left, "*", digit]:
                assert name not in values
                values[name], _ = values[left] * int(digit), defined.append(name)
            case [name, "=", left, operator, right]:
                assert name not in values and left != right
                sign = {"+": 1, "-": -1}[operator]
                values[name], _ = values[left] + sign * values[right], defined.append(name)
            case body:
                raise AssertionError(f"no family has the line {body}")
    question = lines[-1].split()
    asked = question[1] if question[0] == "find" else "total"
    return " ".join(f"{values[asked] % 1000:03d}")


def check_arithmetic(solution: str) -> int:
    """Asserts that every digit line is true and every block consistent with the lines around it; counts blocks."""
    lines = solution.split("\n")
    blocks = 0
    for start, line in enumerate(lines):
        if not line.startswith("u "):
            continue
        work = [DIGIT_LINE.match(text) for text in lines[start : start + 3]]
        assert [m[1] for m in work] == ["u", "t", "h"]
        carry = 0
        for m in work:
            left, right, carried, digit, out = (int(m[group]) for group in (2, 4, 6, 7, 9))
            assert carried == carry
            value = {"+": left + right + carried, "-": left - right - carried, "*": left * right + carried}[m[3]]
            assert value == digit + (-10 if m[3] == "-" else 10) * out
            assert m[8] == ("borrow" if m[3] == "-" else "carry")
            carry = out
        result = to_number(*(m[7] for m in reversed(work)))
        recorded = VALUE.match(lines[start + 3])
        assert to_number(*recorded.groups()[1:]) == (result * 10 % 1000 if recorded[1] == "tens" else result)
        operand_digits = [digit for m in reversed(work) for digit in m[2]]
        if work[0][3] == "*":
            assert len({m[4] for m in work}) == 1
            assert " ".join(operand_digits) in lines[start - 1]
        else:
            assert lines[start - 2].endswith(" ".join(operand_digits))
            assert lines[start - 1].endswith(" ".join(m[4] for m in reversed(work)))
        blocks += 1
    return blocks


@pytest.mark.core
@pytest.mark.parametrize("family", tiny_math.FAMILIES)
def test_the_answer_follows_from_the_prompt_and_every_line_of_the_solution_is_true(family):
    for problem in problems(family, 200):
        assert solve(problem.prompt) == problem.answer
        assert check_arithmetic(problem.solution) == problem.steps
        assert tiny_math.grade(problem.answer, problem.solution)
        assert ANSWER_LINE.match(problem.solution.split("\n")[-1])


@pytest.mark.parametrize("family", tiny_math.FAMILIES)
@pytest.mark.parametrize("lengths", [(300, 320), (450, 1000), (1010, 1500), (1780, 1800)])
def test_lengths_are_kept_and_shorter_and_longer_problems_are_right_too(family, lengths):
    for problem in problems(family, 40, min_tokens=lengths[0], max_tokens=lengths[1]):
        assert solve(problem.prompt) == problem.answer
        assert lengths[0] <= len(tiny_math.encode(problem.document)) <= lengths[1]


# --------------------------------------------------------------------------------------------------- what is needed


@dataclass(frozen=True)
class Recall:
    """A token of the solution copied from an earlier line: its position, where its nearest copy stands, its text.

    `running` marks the running total and the partial product, which stand close before.
    """

    position: int
    source: int
    text: str
    running: bool


def recalls(problem: tiny_math.Problem) -> list[Recall]:
    """Every look-up of a solution: what follows a label, and the digits of every recalled value."""
    lines = f"<|im_start|> {problem.prompt}\nsolution :\n{problem.solution}".split("\n")
    found: list[Recall] = []
    latest: dict[tuple[str, ...], tuple[int, list[str]]] = {}  # key words -> position after the key, words there
    position, in_solution, previous = 0, False, ""
    for line in lines:
        tokens = line.split()
        key_length, body = 0, tokens
        if header := HEADER.match(line):
            # A product is looked up by its label alone when the sum asks for "add s3 : name".
            key_length = 2 if header[1] else 1
            key, body = tuple(word for word in tokens[:key_length] if word != "add"), tokens[key_length:]
        elif VALUE.match(line):
            key_length, key, body = 2, tuple(tokens[:2]), tokens[2:]
        if key_length:
            is_result = previous.startswith("h ")
            if in_solution and not is_result:
                source, words = latest[key]
                for offset, text in enumerate(body):
                    assert words[offset] == text
                    here = position + key_length + offset
                    found.append(Recall(here, source + offset, text, running=key[0] in ("total", "units")))
            latest[key] = position + key_length, body
        in_solution |= line == "solution :"
        position += len(tokens) + 1
        previous = line
    return found


def covered_by_class(problem: tiny_math.Problem, kept: str, budget: int, window: int = 32, sinks: int = 4) -> bool:
    """Whether a cache of sinks, window and the newest tokens of one class holds every token when it is recalled."""
    tokens = tiny_math.words(problem.document)
    of_class = [index for index, token in enumerate(tokens) if tiny_math.token_class(token) == kept]
    for recall in recalls(problem):
        if recall.source >= sinks and recall.position - recall.source > window:
            if tiny_math.token_class(recall.text) != kept:
                return False
            newer = sum(recall.source < index <= recall.position - window for index in of_class)
            if newer >= budget - sinks - window:
                return False
    return True


@pytest.fixture(scope="module")
def looked_up() -> dict[str, list[list[Recall]]]:
    """Per family and problem: the recalls from beyond the step at work, in the default range of lengths."""
    return {
        family: [[recall for recall in recalls(problem) if not recall.running] for problem in problems(family, 100)]
        for family in tiny_math.FAMILIES
    }


def test_steps_look_far_back(looked_up):
    distances = {
        family: [recall.position - recall.source for found in sample for recall in found]
        for family, sample in looked_up.items()
    }
    assert all(statistics.median(found) > 200 for found in distances.values())
    assert statistics.median([d for family in tiny_math.TRAIN_FAMILIES for d in distances[family]]) > 250


@pytest.mark.parametrize("family", tiny_math.FAMILIES)
def test_what_is_needed_is_few_among_many_tokens_like_it(looked_up, family):
    needed = [len({recall.source for recall in found}) for found in looked_up[family]]
    needed_digits = [len({r.source for r in found if r.text.isdigit()}) for found in looked_up[family]]
    documents = [tiny_math.words(problem.document) for problem in problems(family, 100)]
    digits = [sum(token.isdigit() for token in tokens) for tokens in documents]
    assert statistics.mean(needed) < statistics.mean(map(len, documents)) / 5
    assert statistics.mean(digits) > 4 * statistics.mean(needed_digits)


@pytest.mark.parametrize("family", tiny_math.FAMILIES)
def test_neither_recency_nor_one_token_class_holds_what_is_needed(family):
    sample = problems(family, 60)
    for kept in tiny_math.CLASSES:
        assert sum(covered_by_class(problem, kept, budget=256) for problem in sample) <= 0.1 * len(sample)


# --------------------------------------------------------------------------------------------------------- generation


@pytest.mark.core
def test_a_problem_depends_on_its_arguments_alone():
    backwards = [tiny_math.generate(i, seed=3, split="train") for i in reversed(range(20))][::-1]
    assert backwards == [tiny_math.generate(i, seed=3, split="train") for i in range(20)]
    assert backwards != [tiny_math.generate(i, seed=4, split="train") for i in range(20)]


def test_no_problem_of_one_split_is_in_another():
    seen = [{tiny_math.generate(i, seed=0, split=s).prompt for i in range(2000)} for s in ("train", "valid", "test")]
    assert [len(prompts) for prompts in seen] == [2000] * 3
    assert len(set.union(*seen)) == 6000


def test_lengths_are_uniform_between_the_limits_and_families_equally_frequent():
    sample = [tiny_math.generate(i, seed=0, split="valid") for i in range(2000)]
    lengths = [len(tiny_math.encode(problem.document)) for problem in sample]
    assert min(lengths) >= 450 and max(lengths) <= 1000
    thirds = Counter(min(2, (length - 450) // 184) for length in lengths)
    assert all(abs(count / 2000 - 1 / 3) < 0.06 for count in thirds.values())
    families = Counter(problem.family for problem in sample)
    assert set(families) == set(tiny_math.TRAIN_FAMILIES)
    assert all(abs(count / 2000 - 1 / 4) < 0.06 for count in families.values())


@pytest.mark.parametrize(
    "wrong",
    [{"split": "dev"}, {"families": ("algebra",)}, {"families": ()}, {"min_tokens": 10}, {"max_tokens": 5000}],
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(UserError, match="tiny_math"):
        tiny_math.generate(0, **({"seed": 0, "split": "test"} | wrong))


# ------------------------------------------------------------------------------------------------ grading and tokens


@pytest.mark.core
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h 1 + 1 + 0 = 2 carry 0\nanswer : 0 1 2", "0 1 2"),
        ("answer : 0 1 2 <|im_end|>", "0 1 2"),
        ("answer : 0 1 2\nanswer : 3 4 5\n", "3 4 5"),
        ("answer : 0 1 2 <|im_end|>\nanswer : 3 4 5", "0 1 2"),
        ("answer : 0 1", None),
        ("answer : 0 1 2 3", None),
        ("total = 0 1 2", None),
        ("the answer : 0 1 2", None),
        ("", None),
    ],
)
def test_only_a_whole_answer_line_counts(text, expected):
    assert tiny_math.final_answer(text) == expected
    assert tiny_math.grade("0 1 2", text) == (expected == "0 1 2")


def test_token_classes_split_the_vocabulary():
    counts = Counter(tiny_math.token_class(token) for token in tiny_math.TOKENS)
    assert set(counts) == set(tiny_math.CLASSES)
    assert counts["digit"] == 10 and counts["name"] == 60 and counts["label"] == 40
    assert tiny_math.token_class("\n") == "punctuation" and tiny_math.token_class(" 7") == "digit"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TOKENIZER_FOLDER)


def test_the_committed_tokenizer_is_the_vocabulary(tokenizer):
    assert tokenizer.get_vocab() == {token: index for index, token in enumerate(tiny_math.TOKENS)}
    assert len(tiny_math.TOKENS) == len(set(tiny_math.TOKENS)) <= 256
    specials = (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token)
    assert specials == tiny_math.TOKENS[:4]


@pytest.mark.parametrize("family", tiny_math.FAMILIES)
def test_tokenizing_is_lossless_and_the_chat_template_gives_the_training_form(tokenizer, family):
    for problem in problems(family, 20):
        ids = tiny_math.encode(problem.document)
        assert tokenizer(problem.document).input_ids == ids
        assert tokenizer.decode(ids) == problem.document
        assert tokenizer.unk_token_id not in ids
        user = {"role": "user", "content": problem.prompt}
        asked = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
        assert asked == tiny_math.prompt_text(problem.prompt)
        answered = tokenizer.apply_chat_template(
            [user, {"role": "assistant", "content": problem.solution}], tokenize=False
        )
        assert answered == problem.document


def test_tokenizing_any_ids_round_trips(tokenizer):
    ids = [index * 37 % len(tiny_math.TOKENS) for index in range(1, 4 * len(tiny_math.TOKENS))]
    assert tokenizer(tokenizer.decode(ids)).input_ids == ids
