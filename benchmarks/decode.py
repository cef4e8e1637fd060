"""Milliseconds per decode step of every policy, beside full caches and the memory-bandwidth floor.

    python benchmarks/decode.py --shape tiny --policies dense,streaming_llm,tova,kvpop --budget 256 --position 1024
    python benchmarks/decode.py --shape qwen3_8b --policies all --budget 4096 --position 16384 --batch 1,32

Weights are random and caches are filled as they stand at `--position`; only shapes matter for time. All programs are
compiled first and then run in turns, so that their ratios come from the same minutes. The floor reads all weights and
the whole cache once, at the bandwidth that a copy reaches in the same run.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvpop_jax import cli, policies
from kvpop_jax.cache import LayerCache, entry_bytes
from kvpop_jax.errors import UserError
from kvpop_jax.inference import SamplingParams, decode
from kvpop_jax.inference.decode import CacheUsage, DecodeState, Setup
from kvpop_jax.models import DecoderParams, ModelConfig, default_dtype, init_params
from kvpop_jax.policies import PolicySettings
from kvpop_jax.scorers import MLPSettings, MLSTMSettings, Scorer, dims_of, mlp_scorer, mlstm_scorer

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
    cache_bytes: int


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--policies", default="dense,streaming_llm,tova,kvpop", help="names, or all")
    parser.add_argument("--budget", type=int, default=256, help="entries per KV head")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--position", type=int, default=1024, help="tokens already in the sequence")
    parser.add_argument("--batch", default="1", help="batch sizes, comma-separated")
    parser.add_argument("--steps", type=int, default=16, help="steps per dispatch")
    parser.add_argument("--rounds", type=int, default=9, help="dispatches of each program, in turns; medians count")
    parser.add_argument("--output", type=Path, help="JSON file to write as well")
    options = parser.parse_args(argv)
    config, dtype = SHAPES[options.shape], default_dtype()
    names = policies.names() if options.policies == "all" else options.policies.split(",")
    for name in names:
        policies.check(name)
    params = jax.jit(partial(init_params, config, dtype=dtype))(jax.random.key(0))
    bandwidth = copy_bandwidth()
    print(f"{jax.devices()[0].device_kind}, {options.shape}, {dtype.name}; copy {bandwidth / 1e9:.0f} GB/s")
    rows = [
        row
        for batch in map(int, options.batch.split(","))
        for row in measure(config, params, names, batch, options, bandwidth)
    ]
    print(table(rows))
    if options.output is not None:
        options.output.write_text(json.dumps([vars(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    return 0


def measure(
    config: ModelConfig,
    params: DecoderParams,
    names: list[str],
    batch: int,
    options: argparse.Namespace,
    bandwidth: float,
) -> list[Row]:
    """Times every policy at one batch size, in turns."""
    runs: dict[str, Callable[[], None]] = {}
    sizes: dict[str, int] = {}
    for name in names:
        try:
            runs[name], sizes[name] = program(config, params, name, batch, options)
        except UserError as error:
            print(f"{name}: left out, {error}")
    for run in runs.values():
        run()  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append((time.perf_counter() - start) / options.steps)
    typical = {name: float(np.median(values)) for name, values in seconds.items()}
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not config.tie_embeddings:
        weights -= params.embedding_VE.nbytes  # one row of it is read
    streaming = typical.get("streaming_llm")
    return [
        Row(
            policy=name,
            budget=None if name == "dense" else options.budget,
            batch=batch,
            position=options.position,
            ms_per_step=1e3 * found,
            of_streaming=None if streaming is None else found / streaming,
            floor_share=(weights + sizes[name]) / bandwidth / found,
            cache_bytes=sizes[name],
        )
        for name, found in typical.items()
    ]


def program(
    config: ModelConfig, params: DecoderParams, name: str, batch: int, options: argparse.Namespace
) -> tuple[Callable[[], None], int]:
    """A function that runs `steps` steps and waits, and the bytes of all caches."""
    scorer = _scorers(config).get(name)
    policy = policies.make(name, PolicySettings(4, options.window, scorer))
    size = entry_bytes(config.head_dim, params.embedding_VE.dtype)
    budget = options.position + (options.rounds + 2) * options.steps if name == "dense" else options.budget
    budgets = policy.layer_budgets(budget, config.num_layers)
    plans = tuple(policy.plan(each, config, size) for each in budgets)
    setup = Setup(config, (policy,) * config.num_layers, plans, pin_prompt=False)
    own = [None if scorer is None else scorer.init(jax.random.key(n)) for n in range(config.num_layers)]
    state = filled_state(setup, params, own, batch, options.position)
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.caches))
    sampling = SamplingParams(temperature=0.0, max_new_tokens=1 << 19)
    steps = jax.jit(partial(decode.decode_steps, setup, sampling=sampling, steps=options.steps), donate_argnums=(2,))

    def run() -> None:
        nonlocal state
        state, tokens, _ = steps(params, own, state)
        jax.block_until_ready(tokens)

    return run, cache_bytes


def filled_state(setup: Setup, params: DecoderParams, own: list[Any], batch: int, position: int) -> DecodeState:
    """Rows that have read `position` tokens: every slot but scratch is taken, by the latest tokens."""
    token_BS = jnp.zeros((batch, 8), jnp.int32)
    length_B = jnp.full(batch, 8, jnp.int32)
    _, shapes = jax.eval_shape(partial(decode.prefill, setup), params, own, token_BS, length_B, length_B)
    caches = [_filled(shape, plan.capacity, position) for shape, plan in zip(shapes, setup.plans, strict=True)]
    at_B, zero_B = jnp.full(batch, position, jnp.int32), jnp.zeros(batch, jnp.int32)
    usage = decode.cache_usage(caches, at_B)
    usage = CacheUsage(*(jnp.array(leaf) for leaf in (usage.peak_live_BN, usage.peak_mean_BN, usage.survival_B)))
    return DecodeState(caches, zero_B, jnp.zeros(batch), at_B, length_B, at_B + 1, jnp.zeros(batch, bool), usage)


def _filled(shape: LayerCache, capacity: int, position: int) -> LayerCache:
    slots = shape.position_BKC.shape[-1]
    taken = min(capacity, position)
    position_C = jnp.where(jnp.arange(slots) < taken, position - taken + jnp.arange(slots), -1)
    window = shape.ring_BKW.shape[-1]
    ring_W = jnp.zeros(window, jnp.int32)
    if window:
        latest_W = position - 1 - (position - 1 - jnp.arange(window)) % window
        ring_W = jnp.clip(latest_W - (position - taken), 0, taken - 1)
    key = jax.random.key(0)

    def noise(part: Any) -> jax.Array:
        return jax.random.normal(key, part.shape, jnp.float32).astype(part.dtype)

    return LayerCache(
        noise(shape.k_BKCD),
        noise(shape.v_BKCD),
        jnp.broadcast_to(position_C, shape.position_BKC.shape).astype(jnp.int32) + 0,
        noise(shape.priority_BKC),
        jnp.broadcast_to(ring_W, shape.ring_BKW.shape).astype(jnp.int32) + 0,
        jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), shape.state),
    )


def copy_bandwidth() -> float:
    """Bytes per second that an addition to a large array moves, reading and writing."""
    size = 1 << (30 if jax.default_backend() != "cpu" else 27)
    array = jnp.zeros(size // 4, jnp.float32)
    # In place, so that no fresh pages are touched.
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        array = jax.block_until_ready(bump(array))
        seconds.append(time.perf_counter() - start)
    return 2 * size / float(np.median(seconds[1:]))


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| policy | budget | batch | ms per step | of streaming_llm | share of floor | cache MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "" if row.of_streaming is None else f"{row.of_streaming:.2f}"
        lines.append(
            f"| {row.policy} | {row.budget or row.position} | {row.batch} | {row.ms_per_step:.3f} | {ratio} "
            f"| {row.floor_share:.2f} | {row.cache_bytes / 2**20:.1f} |"
        )
    return "\n".join(lines)


def _scorers(config: ModelConfig) -> dict[str, Scorer]:
    return {
        "kvpop": mlstm_scorer(MLSTMSettings(), dims_of(config)),
        "kvpop_mlp": mlp_scorer(MLPSettings(), dims_of(config)),
    }


if __name__ == "__main__":
    cli.run(main)
