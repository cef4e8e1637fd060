"""What keeping one class of tokens is worth on tiny_math: pass@1 of an oracle for every class, and of the dense model.

An oracle keeps sinks, window and the newest tokens of its class; others only where the pool has room. It is told the
classes, and its memory is not charged to the budget.

    python tools/class_oracle.py [--problems 32] [--budgets 256] [any other option of eval.py]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kvpop_jax import cli
from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import generation, tasks
from kvpop_jax.evaluation.command import EvalCommand
from kvpop_jax.evaluation.contestants import DEFAULT_SINKS, DEFAULT_WINDOW, Contestant
from kvpop_jax.evaluation.report import format_table
from kvpop_jax.evaluation.rows import summarise
from kvpop_jax.evaluation.tasks import tiny_math
from kvpop_jax.inference import BatchStatistics, Generator
from kvpop_jax.models import load_model
from kvpop_jax.policies import Policy, PolicySettings, expiry_policy, make
from kvpop_jax.policies.machinery.keeping import prompt_length

TASK = "tiny_math"
AHEAD = 2.0**20  # of any position, and exact in float32 together with one


@dataclass(frozen=True)
class OracleCommand(EvalCommand):
    """As for `eval.py`; policies, tasks, scorer and output are not read.

    Attributes:
        classes: Classes of tokens to keep, one oracle each.
    """

    model: str | None = str(Path(__file__).resolve().parents[1] / "assets" / "qwen3-tiny-math")
    problems: int | None = 32
    budgets: tuple[int, ...] = (256,)
    classes: tuple[str, ...] = tiny_math.CLASSES


class Silent:
    """Is told of work under way and says nothing of it: the bar counts rollouts."""

    def tokens(self, count: int) -> None:
        pass

    def batch(self, contestant: Contestant, statistics: BatchStatistics) -> None:
        pass


def keep_class(kept: str, settings: PolicySettings) -> Policy:
    """A token of the class ranks before all others; within both the newer one does."""
    in_class_V = jnp.array([tiny_math.token_class(token) == kept for token in tiny_math.TOKENS])
    window = settings.window

    def priority(token, position):
        return AHEAD * in_class_V[token] + position.astype(jnp.float32)

    def parallel(_, prompt):
        token_BS, position_BS = prompt.token_BS, prompt.layout.position_BS
        last_B1 = prompt_length(prompt)[:, None] - 1
        # The token at position p is remembered at p modulo the window, until it leaves.
        held_BW = jnp.maximum(last_B1 - (last_B1 - jnp.arange(window)) % window, 0)
        priority_BS = priority(token_BS, position_BS)
        return _like_heads(priority_BS, prompt.k_BSKD.shape[2]), jnp.take_along_axis(token_BS, held_BW, axis=1)

    def recurrent(_, token_BW, new, leaving, plan):
        here_BW = jnp.arange(window) == (new.position_B % window)[:, None]
        leaving_B = jnp.sum(jnp.where(here_BW, token_BW, 0), axis=1)
        priority_B1 = priority(leaving_B, leaving.position_B)[:, None]
        return jnp.where(here_BW, new.token_B[:, None], token_BW), _like_heads(priority_B1, new.k_BKD.shape[1])[..., 0]

    return expiry_policy(f"only {kept}", settings, parallel, recurrent, signals=frozenset({"tokens"}))


def _like_heads(x_BS, num_kv_heads):
    return jnp.repeat(x_BS[:, None], num_kv_heads, axis=1)


def main(argv: Sequence[str]) -> int:
    command = cli.parse(OracleCommand, argv, __doc__)
    if unknown := set(command.classes) - set(tiny_math.CLASSES):
        raise UserError(f"--classes: {', '.join(sorted(unknown))} is none of {', '.join(tiny_math.CLASSES)}")
    model = load_model(str(command.model), None if command.dtype == "auto" else command.dtype)
    task = tasks.get(TASK)
    assert isinstance(task, tasks.GenerationTask)
    sinks = DEFAULT_SINKS if command.sinks is None else command.sinks
    settings = PolicySettings(sinks=sinks, window=command.window or DEFAULT_WINDOW)
    chosen: list[tuple[str, int | None, Policy]] = [("dense", None, make("dense", settings))]
    for budget in command.budgets:
        chosen += [(f"only {kept}", budget, keep_class(kept, settings)) for kept in command.classes]
    contestants = [
        Contestant(name, budget, Generator(model, policy, budget), settings.sinks, settings.window, None)
        for name, budget, policy in chosen
    ]
    jobs = generation.plan(task, model, contestants, command)
    rollouts = []
    with tqdm(total=len(jobs), desc=TASK, unit="rollout") as bar:
        for done in generation.run(task, jobs, model, contestants, command, Silent()):
            rollouts += done
            bar.update(len(done))
            bar.set_postfix_str(f"{done[0].policy}: {np.mean([rollout.grade[task.metric] for rollout in done]):.3f}")
    contexts = {TASK: command.context or task.context(command)}
    rows = summarise(rollouts, model=model.source, contexts=contexts, pin_prompt=False, seed=command.seed)
    print(format_table(rows))
    return 0


if __name__ == "__main__":
    cli.run(main)
