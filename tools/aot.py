"""Compiles a whole sharded program for a TPU slice that is not there, and says what every chip would hold and do.

    python tools/aot.py --config configs/qwen3_8b.yaml --topology v5p:4x4x4 --program train
    python tools/aot.py --config configs/qwen3_4b.yaml --topology v5e:2x2 --program decode --budget 4096 --batch 64

Needs `jax[tpu]`, whose compiler runs on any machine, and no weights: only sizes. Exits 1 if the program does not fit.

FLOPs are counted on the program before compilation, loops by their trip counts (a kernel by its own estimate); the
compiler's count knows no loop. Bytes are a lower bound: arguments read once, results written once, temporaries written
and read once. So the roofline time is a lower bound too; communication is in neither.
"""

import argparse
import json
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

for name, value in (("TPU_SKIP_MDS_QUERY", "1"), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"), ("JAX_PLATFORMS", "cpu")):
    os.environ.setdefault(name, value)  # before JAX is imported

# ruff: noqa: E402
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout

from kvpop_jax import cli, policies, sharding
from kvpop_jax.cache import entry_bytes
from kvpop_jax.config import TrainConfig
from kvpop_jax.errors import UserError
from kvpop_jax.inference import decode
from kvpop_jax.inference.generator import SLOT_MULTIPLE
from kvpop_jax.inference.sampling import SamplingParams
from kvpop_jax.models import ModelConfig, init_params
from kvpop_jax.policies import PolicySettings, uniform_budgets
from kvpop_jax.scorers import dims_of
from kvpop_jax.scorers.files import make_scorer
from kvpop_jax.training import distill
from kvpop_jax.training.data import Batch
from kvpop_jax.training.scan import stack_layers
from kvpop_jax.training.setup import make_optimizers
from kvpop_jax.training.setup_distill import configured_student, scorer_settings
from kvpop_jax.training.step import init_state, make_step

SIZES = Path(__file__).parent / "model_sizes"


@dataclass(frozen=True)
class Chip:
    """One device as JAX sees it; a tpu7x chip is two of them. Peak bfloat16 FLOP/s, HBM in bytes and bytes/s."""

    flops: float
    hbm: float
    bandwidth: float


CHIPS = {
    "v5e": Chip(197e12, 16 * 2**30, 819e9),
    "v5p": Chip(459e12, 95 * 2**30, 2765e9),
    "v6e": Chip(918e12, 32 * 2**30, 1640e9),
    "tpu7x": Chip(2307e12 / 2, 96 * 2**30, 7380e9 / 2),
}


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    chip = CHIPS.get(options.topology.split(":")[0])
    if chip is None:
        raise UserError(f"--topology {options.topology}: the chip must be one of {', '.join(CHIPS)}, as in v5p:4x4x4")
    config = cli.parse(TrainConfig, ["--config", options.config, "--data.paths", "[unread.jsonl]"])
    model = read_sizes(str(config.model.source))
    devices = topologies.get_topology_desc(platform="tpu", topology_name=options.topology).devices
    mesh = make_mesh(options, devices)
    program = {"train": train_program, "prefill": prefill_program, "decode": decode_program}[options.program]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lower, shapes = program(config, model, mesh, options)
        traced = lower.trace(*shapes)
        flops = count_flops(traced.jaxpr) / len(devices)
        start = time.monotonic(), time.process_time()
        try:
            compiled = traced.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            used = re.search(r"Used (\S+) of (\S+) hbm", str(error))
            needs = f"needs {used[1]} of {used[2]}" if used else str(error).splitlines()[0]
            print(f"{options.program} on {options.topology}: does not fit; {needs}")
            return 1
    seconds = time.monotonic() - start[0], time.process_time() - start[1]
    return report(options, mesh, chip, compiled, flops, seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a preset of train.py")
    parser.add_argument("--topology", required=True, help="v5e:2x2, v5p:4x4x4, v6e:8x8, tpu7x:4x4x4, ...")
    parser.add_argument("--program", required=True, choices=("train", "prefill", "decode"))
    parser.add_argument("--mesh", help="data=1,fsdp=64,model=1; default: all fsdp to train, all model to generate")
    parser.add_argument("--batch", type=int, help="rows of the whole slice; default: the configuration's, or 1")
    parser.add_argument("--accumulate", type=int, default=1, help="parts of a training batch, one after the other")
    parser.add_argument("--length", type=int, help="tokens of a row or prompt; default: the configuration's seq_len")
    parser.add_argument("--policy", help="for prefill and decode; default: the configuration's")
    parser.add_argument("--budget", type=int, help="entries per KV head; default: the configuration's first")
    return parser


def make_mesh(options: argparse.Namespace, devices: Any) -> Any:
    sizes = {"fsdp" if options.program == "train" else "model": len(devices)}
    if options.mesh:
        sizes = {name: int(size) for name, size in (part.split("=") for part in options.mesh.split(","))}
    return sharding.make_mesh(**sizes, devices=devices)


def read_sizes(source: str) -> ModelConfig:
    """The sizes of a model whose weights need not be here: a folder, or a hub id known by its last part."""
    known = SIZES / (source.split("/")[-1] + ".json")
    path = Path(source) / "config.json" if Path(source).is_dir() else known
    if not path.is_file():
        raise UserError(f"{source}: no such folder, and its sizes are not in {SIZES}")
    return ModelConfig.from_hf(json.loads(path.read_text()), where=str(path))


def train_program(config: TrainConfig, model: ModelConfig, mesh: Any, options: argparse.Namespace) -> tuple[Any, tuple]:
    """The step that `train.py` runs: all weights and the scorer, the dense teacher beside them."""
    rows, length, dtype = options.batch or config.batch_size, options.length or config.seq_len, jnp.dtype(jnp.bfloat16)
    sharding.check(model, mesh, rows // options.accumulate)
    student, plans = configured_student(config, model, dtype)
    scorer = student.scorer
    optimizers = make_optimizers(config, ("base",) if scorer is None else ("base", "scorer"))

    def state():
        weights = {"base": init_params(model, jax.random.key(0), jnp.dtype(jnp.float32))}
        if scorer is not None:
            weights["scorer"] = [scorer.init(jax.random.key(n)) for n in range(model.num_layers)]
        return init_state(weights, optimizers)

    def frozen():
        return stack_layers(init_params(model, jax.random.key(0), dtype))

    def batch():
        integers, flags = (jnp.zeros((rows, length), kind) for kind in (jnp.int32, jnp.bool))
        return Batch(integers, integers, integers, flags, flags)

    shapes = tuple(sharding.placed(jax.eval_shape(make), mesh) for make in (state, frozen, batch))
    step = make_step(
        distill.distill(model, student, dtype, remat=config.remat),
        optimizers,
        pools=tuple(plan.pool for plan in plans.values()),
        seed=config.seed,
        accumulate=options.accumulate,
        state_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes[0]),
    )
    return step, shapes


def prefill_program(
    config: TrainConfig, model: ModelConfig, mesh: Any, options: argparse.Namespace
) -> tuple[Any, tuple]:
    """Prompts in, logits and compacted caches out."""
    setup, params, scorers, rows, length = _generation(config, model, mesh, options)
    tokens, row = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, length), (rows,)))
    shapes = params, scorers, *(_rows(x, mesh) for x in (tokens, row, row))
    return jax.jit(partial(decode.prefill, setup)), shapes


def decode_program(
    config: TrainConfig, model: ModelConfig, mesh: Any, options: argparse.Namespace
) -> tuple[Any, tuple]:
    """One token per row, sampled; the state is donated."""
    setup, params, scorers, rows, _ = _generation(config, model, mesh, options)
    sampling = SamplingParams(max_new_tokens=1)
    row = jax.ShapeDtypeStruct((rows,), jnp.int32)
    prompt = jax.ShapeDtypeStruct((rows, setup.plans[0].window + 1), jnp.int32)
    start = partial(decode.start, setup, sampling=sampling)
    state = jax.tree.map(_row_major, sharding.placed(jax.eval_shape(start, params, scorers, prompt, row, row), mesh))
    step = partial(decode.decode_steps, setup, sampling=sampling, steps=1)
    out = jax.tree.map(lambda leaf: leaf.format if leaf.ndim == 4 else leaf.sharding, state), None, None
    return jax.jit(step, donate_argnums=(2,), out_shardings=out), (params, scorers, state)


def _generation(config, model, mesh, options):
    rows, length, dtype = options.batch or 1, options.length or config.seq_len, jnp.dtype(jnp.bfloat16)
    sharding.check(model, mesh, rows)
    name = options.policy or config.policy.name
    settings = scorer_settings(replace(config, policy=replace(config.policy, name=name)))
    scorer = None if settings is None else make_scorer(settings, dims_of(model))
    policy = policies.make(name, PolicySettings(config.policy.sinks, config.policy.window, scorer))
    budget = length if name == "dense" else options.budget or config.policy.budgets[0]
    size = entry_bytes(model.head_dim, dtype)
    budgets = uniform_budgets(budget, model.num_layers)
    plans = tuple(policy.plan(budget, model, size).aligned(SLOT_MULTIPLE["tpu"]) for budget in budgets)
    setup = decode.Setup(model, (policy,) * model.num_layers, plans, False)

    def weights():
        owned = [scorer.init(jax.random.key(n)) if scorer else None for n in range(model.num_layers)]
        return init_params(model, jax.random.key(0), dtype), owned

    params, scorers = (sharding.placed(tree, mesh) for tree in jax.eval_shape(weights))
    return setup, params, scorers, rows, length


def _row_major(leaf: Any) -> Any:
    """Keys and values in the order that kernels read. XLA's own choice saves padding and costs a copy at every step."""
    if leaf.ndim != 4:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=Format(Layout((0, 1, 2, 3)), leaf.sharding))


def _rows(shape: Any, mesh: Any) -> Any:
    placed = jax.sharding.NamedSharding(mesh, sharding.spec_of("B", mesh))
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=placed)


def count_flops(jaxpr: Any) -> float:
    """Two per multiplication of every matrix product, over all devices; a `while` of unknown length counts once."""
    jaxpr, total = getattr(jaxpr, "jaxpr", jaxpr), 0.0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            contracted = params["dimension_numbers"][0][0]
            total += (
                2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            )
        elif name == "pallas_call":
            total += params["cost_estimate"].flops
        else:
            times = params["length"] if name == "scan" else params["mesh"].size if name == "shard_map" else 1
            inner = [leaf for value in params.values() for leaf in (value if isinstance(value, tuple) else (value,))]
            total += times * sum(count_flops(leaf) for leaf in inner if hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr"))
    return total


def report(
    options: argparse.Namespace, mesh: Any, chip: Chip, compiled: Any, flops: float, seconds: tuple[float, float]
) -> int:
    """Prints what the compiler says; 0 if it fits."""
    memory, GiB = compiled.memory_analysis(), 2**30
    arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
    temporaries, aliased = memory.temp_size_in_bytes, memory.alias_size_in_bytes
    peak = arguments + results - aliased + temporaries + memory.generated_code_size_in_bytes
    traffic = arguments + results + 2 * temporaries
    compute, reading = flops / chip.flops, traffic / chip.bandwidth
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    print(f"{options.program} on {options.topology} ({sizes}), compiled in {seconds[0]:.0f} s", end="")
    print(f" ({seconds[1]:.0f} s of one core); per device:")
    print(f"  HBM        {peak / GiB:.2f} of {chip.hbm / GiB:.0f} GiB")
    print(f"             arguments {arguments / GiB:.2f}, temporaries {temporaries / GiB:.2f}", end="")
    print(f", results {results / GiB:.2f} of which aliased {aliased / GiB:.2f}")
    print(f"  FLOPs      {flops:.3e}: {compute * 1e3:.2f} ms at peak")
    print(f"  bytes      {traffic:.3e}: {reading * 1e3:.2f} ms at peak")
    fits = peak <= chip.hbm
    print(f"  roofline   {max(compute, reading) * 1e3:.2f} ms; {'fits' if fits else 'DOES NOT FIT'}")
    return 0 if fits else 1


if __name__ == "__main__":
    cli.run(main)
