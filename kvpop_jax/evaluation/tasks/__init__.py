"""The tasks, found by looking: every module here with a `TASKS` tuple adds its tasks. A new task is one new file.

A package with one is a group as well: its name stands for all of its tasks.

- `base`: what a task is.
- `tiny_math_task`: generated multi-step arithmetic with exactly checkable answers.
- `maths`: gsm8k, math500, aime24, aime25, hmmt_feb_2025.
- `gpqa`: gpqa_diamond, multiple choice.
- `livecodebench`: programs that must pass tests.
- `passkey`: a number hidden in long text.
- `ruler`: the thirteen tasks of RULER, generated at any length.
- `longbench`: the 21 tasks of LongBench, over its English and Chinese texts.
- `lm`: likelihood of held-out text, and closeness to the dense model.
"""

import importlib
import pkgutil
from collections.abc import Iterable, Sequence

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.tasks.base import GenerationTask as GenerationTask
from kvpop_jax.evaluation.tasks.base import Grade as Grade
from kvpop_jax.evaluation.tasks.base import Problem as Problem
from kvpop_jax.evaluation.tasks.base import Task as Task
from kvpop_jax.evaluation.tasks.base import TextTask as TextTask
from kvpop_jax.evaluation.tasks.base import Window as Window


def registry() -> dict[str, Task]:
    """All tasks by name, in alphabetical order."""
    found: dict[str, Task] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for task in getattr(importlib.import_module(module.name), "TASKS", ()):
            if task.name in found:
                raise ValueError(f"two tasks are called {task.name!r}; the second is in {module.name}")
            found[task.name] = task
    return dict(sorted(found.items()))


def names() -> tuple[str, ...]:
    """The names of single tasks that `--tasks` takes."""
    return tuple(registry())


def groups() -> dict[str, tuple[str, ...]]:
    """The names of groups that `--tasks` takes, each with those of its tasks."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        tasks = getattr(importlib.import_module(f"{__name__}.{module.name}"), "TASKS", ())
        if module.ispkg and tasks:
            found[module.name] = tuple(task.name for task in tasks)
    return found


def select(names: Sequence[str]) -> list[Task]:
    """The tasks of these names of tasks and groups, each once; `UserError` naming the known ones otherwise."""
    members = groups()
    return [get(name) for name in dict.fromkeys(name for given in names for name in members.get(given, (given,)))]


def get(name: str) -> Task:
    """The task of that name; `UserError` naming the known ones otherwise."""
    tasks = registry()
    if name not in tasks:
        raise UserError(f"unknown task {name!r}; the tasks are {', '.join(_short(tasks))}")
    return tasks[name]


def _short(names: Iterable[str]) -> list[str]:
    """The names of groups, then those of the tasks in none."""
    members = groups()
    grouped = {name for tasks in members.values() for name in tasks}
    return [*(f"{name} (a group)" for name in members), *(name for name in names if name not in grouped)]
