"""What `calibrate.py` does: reads texts, measures, chooses, and writes the plan and its picture."""

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpop_jax import cli, policies
from kvpop_jax.cache import entry_bytes
from kvpop_jax.config import DataConfig
from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.command import load_scorers
from kvpop_jax.models import LoadedModel, load_model
from kvpop_jax.policies import PolicySettings
from kvpop_jax.polykv.choose import choose
from kvpop_jax.polykv.measure import Candidate, Signals, measure
from kvpop_jax.polykv.picture import draw_plan
from kvpop_jax.polykv.plan import PHASES, Plan, read_plan, write_plan
from kvpop_jax.polykv.settings import CalibrateSettings
from kvpop_jax.scorers.files import LoadedScorer
from kvpop_jax.training.documents import encode
from kvpop_jax.training.sources import open_source

DESCRIPTION = """Choose an eviction policy and a budget for every layer of a model (PolyKV), offline; `eval.py --plan`
runs the plan that is written."""

_TRIES = 64
"""Documents looked at for each text that is wanted."""


def main(argv: Sequence[str]) -> int:
    """Calibrates once.

    Returns:
        The exit code.

    Raises:
        UserError: what was asked for cannot be done; one line says why.
    """
    settings = cli.parse(CalibrateSettings, argv, DESCRIPTION)
    output = Path(settings.output)
    if not output.parent.is_dir():
        raise UserError(f"output: no folder {output.parent}")
    if output.suffix not in (".yaml", ".yml"):
        raise UserError(f"output: {output} must end in .yaml; the picture beside it takes the same name and .png")
    cli.check_output(output.parent, "output")
    model = load_model(str(settings.model), None if settings.dtype == "auto" else settings.dtype)
    scorers = load_scorers(settings.scorer, model)
    sinks, window = _sizes(settings, scorers)
    candidates = {
        phase: {name: _candidate(name, settings, scorers, sinks, window) for name in getattr(settings, phase)}
        for phase in PHASES
    }
    # Before the long work: a budget that some candidate cannot work with.
    size = entry_bytes(model.config.head_dim, model.dtype)
    for of_phase in candidates.values():
        for candidate in of_phase.values():
            candidate.policy.plan(settings.budget, model.config, size)
    start = time.perf_counter()
    if settings.reuse:
        signals, data = _reused(settings, model, sinks, window)
    else:
        signals, data = _measured(settings, model, candidates)
    layers = choose(settings, model, candidates, signals, sinks=sinks, window=window)
    plan = Plan(
        name=output.stem,
        model={"source": model.source, "fingerprint": model.fingerprint},
        data=data,
        chosen_by={
            "prefill": settings.prefill_signal if len(settings.prefill) > 1 else "given",
            "decode": settings.decode_signal if len(settings.decode) > 1 else "given",
            "budgets": settings.budget_signal,
        },
        budget=settings.budget,
        sinks=sinks,
        window=window,
        layers=layers,
        signals=dataclasses.asdict(signals) | ({"worst_ppl": signals.worst_ppl()} if signals.ppl else {}),
    )
    write_plan(output, plan)
    picture = draw_plan(plan, output.with_suffix(".png"))
    print(describe(plan))
    print(f"\nwritten to {output} and {picture} after {time.perf_counter() - start:.0f} s")
    return 0


def describe(plan: Plan) -> str:
    """The strategy as lines of text."""
    rows = [("layer", "prefill", "decode", "budget")]
    rows += [(str(n), layer.prefill, layer.decode, str(layer.budget)) for n, layer in enumerate(plan.layers)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    total = sum(layer.budget for layer in plan.layers)
    return "\n".join([*lines, f"total {total} = {len(plan.layers)} layers x {plan.budget} entries per KV head"])


def texts(settings: CalibrateSettings, tokenizer: Any) -> np.ndarray:
    """`sequences` documents, each cut to exactly prompt + continuation, [M, T].

    Raises:
        UserError: too few documents are that long.
    """
    data = DataConfig(source="files" if settings.paths else "tiny_math", paths=settings.paths)
    source = open_source(data, settings.seed)
    length = settings.prompt_tokens + settings.continuation_tokens
    tries = min(len(source), _TRIES * settings.sequences)
    order = np.random.default_rng(settings.seed).choice(len(source), tries, replace=False)
    found: list[list[int]] = []
    for index in order:
        prompt, response = encode(tokenizer, source[int(index)])
        if len(prompt) + len(response) >= length:
            found.append((prompt + response)[:length])
        if len(found) == settings.sequences:
            return np.asarray(found, np.int32)
    raise UserError(
        f"paths: {len(found)} of {tries} documents have {settings.prompt_tokens} + {settings.continuation_tokens} "
        f"tokens; sequences asks for {settings.sequences}: lower prompt_tokens, or name more data"
    )


def _sizes(settings: CalibrateSettings, scorers: Mapping[str, LoadedScorer]) -> tuple[int, int]:
    """Sinks and window: as asked for, else the scorer's, else 4 and 32."""
    trained = next(iter(scorers.values()), None)
    sinks, window = (trained.sinks, trained.window) if trained else (4, 32)
    return (
        sinks if settings.sinks is None else settings.sinks,
        window if settings.window is None else settings.window,
    )


def _candidate(
    name: str, settings: CalibrateSettings, scorers: Mapping[str, LoadedScorer], sinks: int, window: int
) -> Candidate:
    scorer = scorers.get(name)
    if scorer is not None:
        scorer.check_sizes(sinks=sinks, window=window, budgets=(settings.budget,))
    policy = policies.make(
        name, PolicySettings(sinks, window, None if scorer is None else scorer.scorer, settings.methods)
    )
    return Candidate(policy, None if scorer is None else scorer.params)


def _measured(
    settings: CalibrateSettings, model: LoadedModel, candidates: Mapping[str, Mapping[str, Candidate]]
) -> tuple[Signals, dict[str, Any]]:
    token_MT = texts(settings, model.tokenizer)
    if token_MT.shape[1] > model.config.max_position:
        raise UserError(
            f"prompt_tokens + continuation_tokens is {token_MT.shape[1]}; the model's limit is "
            f"{model.config.max_position}"
        )
    signals = measure(
        model,
        candidates,
        token_MT,
        prompt=settings.prompt_tokens,
        budget=settings.budget,
        batch_size=settings.batch_size,
        seed=settings.seed,
        perplexity=True,
    )
    data = {
        "source": ", ".join(settings.paths) or "tiny_math",
        "sequences": settings.sequences,
        "prompt_tokens": settings.prompt_tokens,
        "continuation_tokens": settings.continuation_tokens,
        "budget": settings.budget,
        "sha256": hashlib.sha256(token_MT.tobytes()).hexdigest(),
    }
    return signals, data


def _reused(settings: CalibrateSettings, model: LoadedModel, sinks: int, window: int) -> tuple[Signals, dict[str, Any]]:
    earlier = read_plan(str(settings.reuse))
    earlier.check_model(model)
    if earlier.data.get("budget") != settings.budget:
        raise UserError(
            f"reuse: {settings.reuse} was measured at budget {earlier.data.get('budget')}, not {settings.budget}"
        )
    for name, before, now in (("sinks", earlier.sinks, sinks), ("window", earlier.window, window)):
        if before != now:
            raise UserError(f"reuse: {settings.reuse} was measured with {name} {before}, not {now}")
    values = earlier.signals
    return Signals(values["entropy"], values["cosine"], values["ppl"], values["full_ppl"]), dict(earlier.data)
