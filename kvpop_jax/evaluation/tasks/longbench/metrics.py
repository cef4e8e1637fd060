# ruff: noqa: RUF001 (Chinese punctuation)
"""LongBench's metrics (its section 3.3 and `metrics.py`), each of an answer against one reference, in [0, 1].

Chinese is cut into words by jieba, and ROUGE-L is the rouge package's (its summary-level F), as in the official code;
both come with the extra `longbench`. Edit similarity is difflib's, rounded to hundredths: what fuzzywuzzy computes
without its optional C extension.
"""

import importlib.util
import logging
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from kvpop_jax.errors import UserError

Metric = Callable[[str, str, Sequence[str] | None], float]

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』"
    "【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ALL_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def f1(said: str, answer: str, classes: object = None) -> float:
    """Harmonic mean of precision and recall of the words, without case, punctuation and articles (SQuAD's F1)."""
    return _overlap(_english_words(said), _english_words(answer))


def f1_zh(said: str, answer: str, classes: object = None) -> float:
    """The same of Chinese words, punctuation left out."""
    return _overlap(_plain_chinese_words(said), _plain_chinese_words(answer))


def rouge_l(said: str, answer: str, classes: object = None) -> float:
    """The rouge package's ROUGE-L F; 0 when either is empty."""
    from rouge import Rouge

    limit = sys.getrecursionlimit()
    # It follows the longest common subsequence by recursion, at most one call a word.
    sys.setrecursionlimit(max(limit, 1000 + len(said.split()) + len(answer.split())))
    try:
        return float(Rouge(metrics=["rouge-l"]).get_scores(said, answer)[0]["rouge-l"]["f"])
    except ValueError:
        return 0.0
    finally:
        sys.setrecursionlimit(limit)


def rouge_l_zh(said: str, answer: str, classes: object = None) -> float:
    """The same of Chinese words."""
    return rouge_l(" ".join(_chinese_words(said)), " ".join(_chinese_words(answer)))


def accuracy(said: str, answer: str, classes: Sequence[str] | None = None) -> float:
    """One over the number of classes that are named, if the right one is among them.

    A class whose name is part of the right one's does not count.
    """
    named = [name for name in classes or () if name in said]
    # Removing while going over the list passes over the next one: so does the official code, and scores depend on it.
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1.0 / len(named) if answer in named else 0.0


def retrieval(said: str, answer: str, classes: object = None) -> float:
    """Share of the numbers said that are the reference's ("Paragraph 7", or its Chinese form)."""
    return count(said, (re.findall(r"\d+", answer) or [answer])[0])


def count(said: str, answer: str, classes: object = None) -> float:
    """Share of the numbers said that are the right one."""
    numbers = re.findall(r"\d+", said)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def edit_similarity(said: str, answer: str, classes: object = None) -> float:
    """How alike the next line of code and the first line said are that is neither comment nor a fence of Markdown."""
    lines = said.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


METRICS: dict[str, Metric] = {
    "f1": f1,
    "f1_zh": f1_zh,
    "rouge_l": rouge_l,
    "rouge_l_zh": rouge_l_zh,
    "accuracy": accuracy,
    "retrieval": retrieval,
    "count": count,
    "edit_similarity": edit_similarity,
}
_PACKAGES = {"f1_zh": ("jieba",), "rouge_l": ("rouge",), "rouge_l_zh": ("jieba", "rouge")}


def check_installed(metric: str, task: str) -> None:
    """Raises `UserError` when the metric needs a package that is not installed."""
    for package in _PACKAGES.get(metric, ()):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{task}: its metric {metric} needs {package}; `pip install 'kvpop-jax[longbench]'`")


def _overlap(said: list[str], answer: list[str]) -> float:
    shared = (Counter(said) & Counter(answer)).total()
    return 2 * shared / (len(said) + len(answer)) if shared else 0.0


def _english_words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _chinese_words(text: str) -> list[str]:
    import jieba

    jieba.setLogLevel(logging.WARNING)
    return list(jieba.cut(text))


def _plain_chinese_words(text: str) -> list[str]:
    plain = ("".join(word.lower().translate(_ALL_PUNCTUATION).split()) for word in _chinese_words(text))
    return [word for word in plain if word]
