"""Milliseconds per decode step of every policy, beside full caches and the memory-bandwidth floor.

    python benchmarks/decode.py --shape tiny --policies dense,streaming_llm,tova,kvpop --budget 256 --positions 1024
    python benchmarks/decode.py --shape qwen3_8b --policies all --budget 4096 --positions 16384 --batch 1,32

Weights are random and caches are filled as they stand at each position; only shapes matter for time. The programs of a
batch size are compiled first and then run in turns, so that their ratios come from the same minutes. The floor reads
all weights and the whole cache once, at the bandwidth that a copy reaches in the same run. Peak memory is what the
compiler accounts for: arguments, outputs and temporaries, aliased ones once.

`--beside transformers` adds Qwen3 of the same shape in transformers: a static cache of the largest position's size,
compiled with CUDA graphs, batch 1. It runs to its end in a process of its own before JAX takes the device's memory.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arguments import batches, count, counts
from bandwidth import copy_bandwidth
from beside import Transformers
from jaxtyping import Array, Int
from profiler import kernel_times

from kvpop_jax import cli, policies
from kvpop_jax.cache import CLOSED, EMPTY, CachePlan, LayerCache, cache_dtype_of, entry_bytes
from kvpop_jax.errors import UserError
from kvpop_jax.inference import SamplingParams, decode
from kvpop_jax.inference.decode import DecodeState, Setup
from kvpop_jax.inference.generator import SLOT_MULTIPLE
from kvpop_jax.models import DecoderParams, ModelConfig, default_dtype, init_params
from kvpop_jax.policies import PolicySettings
from kvpop_jax.scorers import MLPSettings, MLSTMSettings, Scorer, dims_of, mlp_scorer, mlstm_scorer
from pallas_kernels.backend import platform

_QWEN3 = ModelConfig(
    family="qwen3", vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32,
    num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling=None, tie_embeddings=False,
    qk_norm=True, max_position=1 << 20, bos_token_id=None, eos_token_ids=(), pad_token_id=0,
)  # fmt: skip
SHAPES = {
    "qwen3_8b": _QWEN3,
    "qwen3_4b": replace(_QWEN3, hidden_size=2560, intermediate_size=9728, tie_embeddings=True),
    "qwen3_0.6b": replace(
        _QWEN3, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_embeddings=True
    ),
    "tiny": replace(
        _QWEN3, vocab_size=187, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=4, num_kv_heads=2,
        head_dim=64, tie_embeddings=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measurement; bytes are of the device's memory."""

    policy: str
    budget: int | None
    batch: int
    position: int
    ms_per_step: float
    of_streaming: float | None
    floor_share: float
    tokens_per_s: float
    cache_bytes: int
    peak_bytes: int


@dataclass(frozen=True, eq=False)
class Program:
    """A policy's compiled steps at one batch size and capacity, and how to fill its caches.

    Attributes:
        positions: what it is timed at; a bounded cache is the same program at each.
        run: (parameters, scorers, state) -> state, tokens, log-probabilities; `steps` steps in one dispatch.
        start: position -> a state to go on from.
        cache_bytes, peak_bytes: of all caches; of everything the program needs at once.
    """

    policy: str
    batch: int
    positions: tuple[int, ...]
    run: Callable[..., Any]
    scorers: list[Any]
    start: Callable[[int], DecodeState]
    cache_bytes: int
    peak_bytes: int


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=count, help="fewer layers than the shape has, for a quick look")
    parser.add_argument("--policies", default="dense,streaming_llm,tova,kvpop", help="names, or all")
    parser.add_argument("--budget", type=count, default=256, help="entries per KV head")
    parser.add_argument("--window", type=count, default=32)
    parser.add_argument(
        "--positions", type=counts, help="tokens already in the sequence, comma-separated; default: 1024 or of --length"
    )
    parser.add_argument("--length", type=count, help="a generation of so many tokens, timed at 8 positions")
    parser.add_argument(
        "--batch", type=batches, default="1", help="batch sizes, comma-separated; max is the largest that fits"
    )
    parser.add_argument("--steps", type=count, default=16, help="steps per dispatch")
    parser.add_argument("--rounds", type=count, default=3, help="dispatches timed in each turn, after one to warm up")
    parser.add_argument("--turns", type=count, default=3, help="turns; medians over all count")
    parser.add_argument(
        "--cache_dtype", choices=("int8", "fp8"), help="of keys and values; default: that of the weights"
    )
    parser.add_argument("--beside", choices=("transformers",), help="what to time as well, at batch 1")
    parser.add_argument("--profile", action="store_true", help="list what a step runs on a GPU, kernel by kernel")
    parser.add_argument("--output", type=Path, help="JSON file to write as well")
    options = parser.parse_args(argv)
    middles = () if options.length is None else tuple((2 * n + 1) * options.length // 16 for n in range(8))
    options.positions = tuple(sorted({*middles, *(options.positions or ())})) or (1024,)
    names = policies.names() if options.policies == "all" else options.policies.split(",")
    check(names, options)
    config = SHAPES[options.shape]
    config = replace(config, num_layers=options.layers or config.num_layers)
    others = transformers_row(config, options) if options.beside else ""
    if None in options.batch and jax.devices()[0].memory_stats() is None:
        raise UserError("--batch max needs a device that reports its memory; give a number")
    dtype = default_dtype()
    params = init_params(config, jax.random.key(0), dtype)
    bandwidth = copy_bandwidth()
    print(f"{jax.devices()[0].device_kind}, {options.shape}, {dtype.name}; copy {bandwidth / 1e9:.0f} GB/s", flush=True)
    rows = []
    for batch in options.batch:
        programs = compile_all(config, params, names, batch, options)
        rows += to_rows(programs, time_all(programs, params, options), read_bytes(config, params), bandwidth, options)
        if options.profile:
            profile(programs, params, options.steps)
    print(table(rows) + others)
    if options.length is not None:
        print(generations([row for row in rows if row.position in middles], options.length))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps([vars(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    return 0


def check(names: list[str], options: argparse.Namespace) -> None:
    """Refuses what would only fail, or mislead, after long work; does not touch the device, which is not JAX's yet.

    Raises:
        UserError: an unknown policy, a file that cannot be written, or a batch that would change within a generation.
    """
    for name in names:
        policies.check(name)
    if options.output is not None:
        cli.check_output(options.output.parent, "--output")
    if min(options.positions) < 1:
        raise UserError(f"--length {options.length} is too short to be timed at 8 positions")
    if None in options.batch and options.length is not None and "dense" in names:
        raise UserError("--batch max differs at each position of a dense cache: with --length give numbers")


def transformers_row(config: ModelConfig, options: argparse.Namespace) -> str:
    """transformers' line of the table, or one that says why there is none."""
    cache = max(options.positions)
    count = options.steps * options.rounds
    worker = Transformers({"config": config.to_hf(), "cache": cache, "steps": min(count, cache // 2)})
    try:
        worker.seconds_per_token()
        found = float(np.median([worker.seconds_per_token() for _ in range(options.turns)]))
        worker.close()
    except UserError as error:
        return f"\n{error}"
    return f"\n| transformers | {cache} | 1 | {cache} | {1e3 * found:.3f} | | | {1 / found:.1f} | |"


def compile_all(
    config: ModelConfig, params: DecoderParams, names: list[str], batch: int | None, options: argparse.Namespace
) -> list[Program]:
    """The programs of one batch size, compiled side by side: XLA needs one core for each."""
    wanted = [(name, options.positions) for name in names if name != "dense"]
    # A dense cache is given just the slots its position needs: the best that a cache that grows could do.
    wanted += [("dense", (position,)) for position in options.positions if "dense" in names]
    waiting = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, at in wanted:
            try:
                waiting.append(pool.submit(*lowered(config, params, name, batch, at, options)))
            except UserError as error:
                print(f"{name}: left out, {error}")
        return [each.result() for each in waiting]


def lowered(
    config: ModelConfig, params: DecoderParams, name: str, batch: int | None, positions: tuple[int, ...],
    options: argparse.Namespace,
) -> tuple[Callable[[], Program]]:  # fmt: skip
    """What is left to do for a program once it is traced: to compile it."""
    scorer = _scorers(config).get(name)
    policy = policies.make(name, PolicySettings(4, options.window, scorer))
    cached = cache_dtype_of(options.cache_dtype, params.embedding_VE.dtype)
    size, rows_as = entry_bytes(config.head_dim, cached), None if options.cache_dtype is None else cached.name
    fed = (options.rounds + 1) * options.steps
    budgets = policy.layer_budgets(positions[0] + fed if name == "dense" else options.budget, config.num_layers)
    multiple = SLOT_MULTIPLE.get(platform(), 1)
    plans = tuple(replace(policy.plan(each, config, size).aligned(multiple), rows=rows_as) for each in budgets)
    setup = Setup(config, (policy,) * config.num_layers, plans, pin_prompt=False)
    own = [None if scorer is None else scorer.init(jax.random.key(n)) for n in range(config.num_layers)]
    row = jax.eval_shape(partial(filled_state, setup, params, own, 1, 0))
    rows = largest_batch(params, row) if batch is None else batch
    start = jax.jit(partial(filled_state, setup, params, own, rows))
    state = jax.eval_shape(start, 0)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=1 << 19)
    steps = jax.jit(partial(decode.decode_steps, setup, sampling=sampling, steps=options.steps), donate_argnums=(2,))
    traced = steps.lower(params, own, state)

    def finish() -> Program:
        run = traced.compile()
        memory: Any = run.memory_analysis()
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        return Program(name, rows, positions, run, own, start, _bytes(state.caches), peak - memory.alias_size_in_bytes)

    return (finish,)


def largest_batch(params: DecoderParams, row: DecodeState) -> int:
    """Rows whose caches fit beside the weights, with room for each row's logits and a twentieth to spare."""
    stats = jax.devices()[0].memory_stats()
    assert stats is not None, "main has looked"
    logits = 4 * 4 * params.embedding_VE.shape[0]
    return max(1, int(0.95 * stats["bytes_limit"] - _bytes(params)) // (_bytes(row.caches) + logits))


def time_all(
    programs: list[Program], params: DecoderParams, options: argparse.Namespace
) -> dict[tuple[Program, int], float]:
    """Median seconds per step of every program and position, taken in turns."""
    seconds: dict[tuple[Program, int], list[float]] = {}
    for _ in range(options.turns):
        for program in programs:
            for position in program.positions:
                state = program.start(position)  # Freed before the next one: at large batches two do not fit.
                for number in range(options.rounds + 1):
                    began = time.perf_counter()
                    state, tokens, _ = program.run(params, program.scorers, state)
                    jax.block_until_ready(tokens)
                    if number:
                        spent = (time.perf_counter() - began) / options.steps
                        seconds.setdefault((program, position), []).append(spent)
                del state, tokens
    return {key: float(np.median(values)) for key, values in seconds.items()}


def profile(programs: list[Program], params: DecoderParams, steps: int) -> None:
    """Prints the kernels of a step of every program."""
    for program in programs:
        state, tokens, _ = program.run(params, program.scorers, program.start(program.positions[0]))
        jax.block_until_ready(tokens)
        lines = kernel_times(partial(program.run, params, program.scorers, state), steps, most=40)
        print(f"{program.policy}, batch {program.batch}, of a step:", *lines, sep="\n    ", flush=True)


def to_rows(
    programs: list[Program],
    seconds: dict[tuple[Program, int], float],
    weights: int,
    bandwidth: float,
    options: argparse.Namespace,
) -> list[Row]:
    """Rows of the table, each beside StreamingLLM's at the same batch and position."""
    streaming = {
        (program.batch, at): found for (program, at), found in seconds.items() if program.policy == "streaming_llm"
    }
    return [
        Row(
            policy=program.policy,
            budget=None if program.policy == "dense" else options.budget,
            batch=program.batch,
            position=at,
            ms_per_step=1e3 * found,
            of_streaming=found / streaming[program.batch, at] if (program.batch, at) in streaming else None,
            floor_share=(weights + program.cache_bytes) / bandwidth / found,
            tokens_per_s=program.batch / found,
            cache_bytes=program.cache_bytes,
            peak_bytes=program.peak_bytes,
        )
        for program in programs
        for at in program.positions
        for found in [seconds[program, at]]
    ]


def read_bytes(config: ModelConfig, params: DecoderParams) -> int:
    """Weights that a step reads: all, but one row of an embedding that is not the head too."""
    return _bytes(params) - (0 if config.tie_embeddings else params.embedding_VE.nbytes)


def filled_state(
    setup: Setup, params: DecoderParams, own: list[Any], batch: int, position: int | Int[Array, ""]
) -> DecodeState:
    """Rows that have read `position` tokens: every slot but scratch is taken, by the latest tokens."""
    token_BS = jnp.zeros((batch, 8), jnp.int32)
    length_B = jnp.full(batch, 8, jnp.int32)
    _, shapes = jax.eval_shape(partial(decode.prefill, setup), params, own, token_BS, length_B, length_B)
    caches = [_filled(shape, plan, position) for shape, plan in zip(shapes, setup.plans, strict=True)]
    at_B, zero_B = jnp.full(batch, position, jnp.int32), jnp.zeros(batch, jnp.int32)
    usage = decode.cache_usage(caches, at_B)
    return DecodeState(caches, zero_B, jnp.zeros(batch), at_B, length_B, at_B + 1, jnp.zeros(batch, bool), usage)


def _filled(shape: LayerCache, plan: CachePlan, position: int | Int[Array, ""]) -> LayerCache:
    slot_C = jnp.arange(plan.allocated)
    taken = jnp.minimum(plan.capacity, position)
    vacant_C = jnp.where(slot_C < plan.slots, EMPTY, CLOSED)
    position_C = jnp.where(slot_C < taken, position - taken + slot_C, vacant_C)
    window = shape.ring_BKW.shape[-1]
    ring_W = jnp.zeros(window, jnp.int32)
    if window:
        latest_W = position - 1 - (position - 1 - jnp.arange(window)) % window
        ring_W = jnp.clip(latest_W - (position - taken), 0, taken - 1)
    key = jax.random.key(0)

    def noise(part: Any) -> jax.Array:
        return jax.random.normal(key, part.shape, jnp.float32).astype(part.dtype)

    return LayerCache(
        jax.tree.map(noise, shape.k_BKCD),
        jax.tree.map(noise, shape.v_BKCD),
        jnp.broadcast_to(position_C, shape.position_BKC.shape).astype(jnp.int32),
        noise(shape.priority_BKC),
        jnp.broadcast_to(ring_W, shape.ring_BKW.shape).astype(jnp.int32),
        jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), shape.state),
    )


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| policy | budget | batch | position | ms per step | of streaming_llm | share of floor | tokens/s | peak GB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "" if row.of_streaming is None else f"{row.of_streaming:.2f}"
        lines.append(
            f"| {row.policy} | {row.budget or row.position} | {row.batch} | {row.position} | {row.ms_per_step:.3f} "
            f"| {ratio} | {row.floor_share:.2f} | {row.tokens_per_s:.1f} | {row.peak_bytes / 1e9:.2f} |"
        )
    return "\n".join(lines)


def generations(rows: list[Row], length: int) -> str:
    """Seconds for `length` tokens of every row of a batch, from the steps timed in the middle of 8 equal parts."""
    each: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        each.setdefault((row.policy, row.batch), []).append(row.ms_per_step)
    lines = [
        f"{policy}, batch {batch}: {length} tokens of each row in {length * np.mean(found) / 1e3:.0f} s"
        for (policy, batch), found in each.items()
    ]
    return "\n".join(lines)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _scorers(config: ModelConfig) -> dict[str, Scorer]:
    return {
        "kvpop": mlstm_scorer(MLSTMSettings(), dims_of(config)),
        "kvpop_mlp": mlp_scorer(MLPSettings(), dims_of(config)),
    }


if __name__ == "__main__":
    cli.run(main)
