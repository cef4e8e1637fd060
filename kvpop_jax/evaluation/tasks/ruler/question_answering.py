"""`qa_1`, `qa_2`: a question of SQuAD or HotpotQA, its paragraphs among others of the data set (RULER, section 3)."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks.ruler.recipe import Draw, Growing, Recipe, Sample

_MESSAGE = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me "
    "the answer and do not output any other words.\n\nQuestion: {query}"
)
_OPENING = " Answer:"


@dataclass(frozen=True)
class Question:
    """A question, answers that all count as right, and places in the list of documents: its own, and of its article."""

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """A data set: the file in `data_dir`, what it is, and how its JSON is read into questions and documents."""

    name: str
    file: str
    official: str
    read: Callable[[Any], tuple[list[Question], list[str]]]


def squad(content: Any) -> tuple[list[Question], list[str]]:
    """The answerable questions of SQuAD 2.0's JSON in file order, and all its paragraphs, each once."""
    articles = [article["paragraphs"] for article in content["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    places = {document: place for place, document in enumerate(documents)}
    questions = []
    for article in articles:
        in_article = dict.fromkeys(places[paragraph["context"]] for paragraph in article)
        for paragraph in article:
            own = places[paragraph["context"]]
            related = tuple(place for place in in_article if place != own)
            for asked in paragraph["qas"]:
                if not asked.get("is_impossible", False):
                    answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                    questions.append(Question(asked["question"], answers, (own,), related))
    return questions, documents


def hotpotqa(content: Any) -> tuple[list[Question], list[str]]:
    """The questions of HotpotQA's distractor JSON in file order, and all its titled paragraphs, each once."""
    paragraphs = [[f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]] for row in content]
    documents = sorted({document for row in paragraphs for document in row})
    places = {document: place for place, document in enumerate(documents)}
    questions = [
        Question(row["question"], (row["answer"],), tuple(dict.fromkeys(places[document] for document in own)))
        for row, own in zip(content, paragraphs, strict=True)
    ]
    return questions, documents


SOURCES = (
    Source("qa_1", "squad.json", "SQuAD 2.0's dev-v2.0.json", squad),
    Source("qa_2", "hotpotqa.json", "HotpotQA's hotpot_dev_distractor_v1.json", hotpotqa),
)


def sample(question: Question, documents: list[str], seed: str, count: int) -> Sample:
    """The prompt with that many documents: the question's own, then others of its article, then any, shuffled."""
    rng = random.Random(seed)
    related = rng.sample(question.related, len(question.related))
    near = {*question.own, *related}
    others = [place for place in range(len(documents)) if place not in near]
    order = [*question.own, *related, *rng.sample(others, len(others))]
    chosen = [documents[order[index % len(order)]] for index in range(count)]
    rng.shuffle(chosen)
    context = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(chosen, start=1))
    return Sample(_MESSAGE.format(context=context, query=question.text), _OPENING, question.answers)


def _recipe(source: Source) -> Recipe:
    def check(settings: EvalSettings) -> Path:
        path = Path(settings.data_dir or ".") / source.file
        if settings.data_dir is None or not path.is_file():
            raise UserError(f"ruler_{source.name}: no file {path}; --data_dir must hold {source.official} by that name")
        return path

    def open_(settings: EvalSettings) -> Callable[[Draw], Growing]:
        path = check(settings)
        try:
            questions, documents = source.read(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not {source.official}: {type(error).__name__} {error}") from error
        if not questions:
            raise UserError(f"{path}: no questions in the file")

        def draw(one: Draw) -> Growing:
            question = questions[one.number % len(questions)]
            return Growing(len(question.own), lambda count: sample(question, documents, one.seed, count))

        return draw

    return Recipe(source.name, "string_match_part", 32, check, open_)


RECIPES = tuple(map(_recipe, SOURCES))
