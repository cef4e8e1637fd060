"""LongBench (Bai et al., 2023, arXiv 2308.14508): 21 tasks over long English and Chinese texts, with their metrics.

- `datasets`: the prompt, answer length and metric of every task.
- `metrics`: the metrics, in [0, 1]; the paper prints them times 100.
- `rows`: the problems, from a folder or the hub.

Prompts, answer lengths, metrics, the texts that get no chat template, and cutting over-long prompts in the middle are
those of the official `pred.py` and `eval.py`. What differs:

- A prompt is cut only if `--max_prompt_tokens` says to how many tokens; the official code has a number for each model.
- A prompt asks a thinking model not to think (most answers have 32 to 128 tokens).
- `samsum` is not stopped at its first line break, as only its first line counts.
- A summary of more words than Python may recurse is scored; there the official code gives 0.
"""

import json
from typing import Any

from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.evaluation.tasks.base import GenerationTask, Grade, Problem
from kvpop_jax.evaluation.tasks.longbench import metrics, rows
from kvpop_jax.evaluation.tasks.longbench.datasets import DATASETS, Dataset

CONTEXT = 8192  # what compression is measured against; the texts average 7 thousand English words


def cut_middle(tokenizer: Any, text: str, most: int) -> str:
    """The text, or of a text of more tokens than `most` its first and its last half of so many."""
    tokens = tokenizer(text)["input_ids"]
    if len(tokens) <= most:
        return text
    half = most // 2
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (tokens[:half], tokens[-half:]))


def _task(dataset: Dataset) -> GenerationTask:
    metric = metrics.METRICS[dataset.metric]

    def check(settings: EvalSettings) -> None:
        metrics.check_installed(dataset.metric, f"longbench_{dataset.name}")
        rows.locate(dataset.name, settings)

    def problems(settings: EvalSettings, tokenizer: Any) -> list[Problem]:
        found = []
        for row in rows.load(dataset.name, settings):
            prompt = dataset.prompt.format(context=row.context, input=row.question)
            if settings.max_prompt_tokens is not None:
                prompt = cut_middle(tokenizer, prompt, settings.max_prompt_tokens)
            answer = json.dumps({"answers": row.answers, "classes": row.classes}, ensure_ascii=False)
            found.append(Problem(row.id, prompt, answer, style=dataset.style))
        return found

    def grade(problem: Problem, text: str) -> Grade:
        said = text.lstrip("\n").split("\n")[0] if dataset.first_line else text
        reference = json.loads(problem.answer)
        scores = (metric(said, answer, reference["classes"]) for answer in reference["answers"])
        return Grade(max(scores, default=0.0), said.strip()[-200:] or None)

    return GenerationTask(
        name=f"longbench_{dataset.name}",
        metric=dataset.metric,
        max_new_tokens=lambda _: dataset.answer_tokens,
        context=lambda settings: settings.max_prompt_tokens or CONTEXT,
        check=check,
        problems=problems,
        grade=grade,
    )


TASKS = tuple(map(_task, DATASETS))
