"""Times the step that `train.py` runs, on random weights and tokens: tokens per second, MFU and memory of a device.

    python benchmarks/training.py --method kvpop,dense --layers 28 --length 16384 --batch 1
    python benchmarks/training.py --mesh fsdp=2 --batch 2

`kvpop` distils weights and scorer under a budget from the dense model; `dense` distils the model from itself with full
attention (what `kvpop` would cost without eviction); `pretrain` is cross entropy.

MFU counts what the mathematics needs, over the peak of the chip's matrix units in bfloat16: 2 FLOPs per weight and
token, 4 D per query head and key that a query sees, and twice as much again backward. Under a budget a query sees at
most the budget's keys, so nothing is credited for keys left out. Recomputed layers, the scorer and its target count
nothing. Memory is the compiler's: arguments, results that are not aliased, and temporaries.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arguments import count
from profiler import kernel_times

from kvpop_jax import cli, sharding
from kvpop_jax.config import ModelSource, PolicyConfig, TrainConfig
from kvpop_jax.errors import UserError
from kvpop_jax.models import DecoderParams, ModelConfig, init_params, unembed
from kvpop_jax.sharding import MeshSettings
from kvpop_jax.training import distill, losses, objectives
from kvpop_jax.training.data import Batch
from kvpop_jax.training.scan import stack_layers
from kvpop_jax.training.setup import make_optimizers
from kvpop_jax.training.setup_distill import configured_student
from kvpop_jax.training.stacked import Stacked
from kvpop_jax.training.step import Objective, TrainState, init_state, make_step

PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v6 lite": 918e12}
"""Peak bfloat16 FLOP/s, by a part of the device's name."""

METHODS = "kvpop", "dense", "pretrain"


@dataclass(frozen=True)
class Shape:
    """One measurement: what is trained, on what."""

    method: str
    model: ModelConfig
    config: TrainConfig
    dtype: jnp.dtype


@dataclass(frozen=True)
class Step:
    """The compiled step's parts: the step and how its arguments are made."""

    run: Any
    state: Any
    frozen: Any
    batch: Any


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="kvpop", help=f"comma-separated, of {', '.join(METHODS)}")
    add_options(parser)
    parser.add_argument("--length", type=count, default=16_384, help="tokens of a row")
    parser.add_argument("--batch", type=count, default=1, help="rows of the whole mesh")
    parser.add_argument("--accumulate", type=count, default=1, help="parts of the batch, one after the other")
    parser.add_argument("--mesh", default="", help="fsdp=2, or data=1,fsdp=2,model=1; default: one device")
    parser.add_argument("--steps", type=count, default=8, help="timed, after two to warm up")
    parser.add_argument("--profile", action="store_true", help="list what a step runs on a GPU, kernel by kernel")
    options = parser.parse_args(argv)
    settings = mesh_settings(options.mesh)
    mesh = sharding.global_mesh(settings)
    given = dict(length=options.length, batch=options.batch, accumulate=options.accumulate)
    shapes = [shape_of(options, method=method, **given) for method in options.method.split(",")]
    for shape in shapes:
        sharding.check(shape.model, mesh, options.batch // options.accumulate)
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    print(f"{mesh.size} x {jax.devices()[0].device_kind} ({sizes}), JAX {jax.__version__}; {options.layers} layers")
    print("| method | tokens | rows | ms a step | tokens/s | tokens/s a device | MFU | GiB a device | compiled in s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for shape in shapes:
        print(measure(shape, mesh, options.steps, profile=options.profile), flush=True)
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is trained; the defaults are the sizes of Qwen3-0.6B."""
    parser.add_argument("--layers", type=count, default=28)
    parser.add_argument("--hidden", type=count, default=1024)
    parser.add_argument("--intermediate", type=count, default=3072)
    parser.add_argument("--heads", type=count, default=16)
    parser.add_argument("--kv_heads", type=count, default=8)
    parser.add_argument("--head_dim", type=count, default=128)
    parser.add_argument("--vocab", type=count, default=151_936)
    parser.add_argument("--budget", type=count, default=4096, help="entries per KV head of method kvpop")
    parser.add_argument("--window", type=count, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="inside a step")
    parser.add_argument("--remat", action=argparse.BooleanOptionalAction, default=True, help="recompute layers")


def shape_of(
    options: argparse.Namespace, *, length: int, method: str | None = None, batch: int = 1, accumulate: int = 1
) -> Shape:
    """The measurement that the options describe.

    Raises:
        UserError: an unknown method, or sizes that a training refuses.
    """
    method = options.method if method is None else method
    if method not in METHODS:
        raise UserError(f"--method {method} is none of {', '.join(METHODS)}")
    model = ModelConfig(
        family="qwen3", vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=options.intermediate,
        num_layers=options.layers, num_heads=options.heads, num_kv_heads=options.kv_heads, head_dim=options.head_dim,
        rms_norm_eps=1e-6, rope_theta=1e6, rope_scaling=None, tie_embeddings=True, qk_norm=True,
        max_position=max(length, 2), bos_token_id=None, eos_token_ids=(0,), pad_token_id=0,
    )  # fmt: skip
    config = TrainConfig(
        name="benchmark", model=ModelSource(source="random"), seq_len=length, batch_size=batch, accumulate=accumulate,
        remat=options.remat, policy=PolicyConfig(window=options.window, budgets=(options.budget,)),
    )  # fmt: skip
    return Shape(method, model, config, jnp.dtype(options.dtype))


def mesh_settings(text: str) -> MeshSettings:
    """`fsdp=2,model=4` as sizes.

    Raises:
        UserError: another form, or another axis.
    """
    try:
        return MeshSettings(**{name: int(size) for name, size in (part.split("=") for part in text.split(",") if part)})
    except (TypeError, ValueError) as error:
        raise UserError(f"--mesh {text} must look like data=1,fsdp=2,model=1") from error


def build(shape: Shape, state_shardings: Any = None) -> Step:
    """The step of that method, and functions without arguments that make its state and its frozen weights."""
    config, model, dtype = shape.config, shape.model, shape.dtype
    frozen: Callable[[], Any] = partial(_frozen, model, dtype)
    pools: tuple[int, ...] = (0,)
    scorer = None
    objective: Objective
    if shape.method == "pretrain":
        objective, frozen = objectives.pretrain(model, dtype, remat=config.remat), tuple
    elif shape.method == "dense":
        objective = _dense_distillation(shape)
    else:
        student, plans = configured_student(config, model, dtype)
        objective = distill.distill(model, student, dtype, remat=config.remat)
        pools, scorer = tuple(plan.pool for plan in plans.values()), student.scorer
    optimizers = make_optimizers(config, ("base",) if scorer is None else ("base", "scorer"))

    def state() -> TrainState:
        weights: dict[str, Any] = {"base": _weights(model, jnp.dtype(jnp.float32))}
        if scorer is not None:
            weights["scorer"] = _stacked(scorer.init(jax.random.key(0)), model)
        return init_state(weights, optimizers)

    run = make_step(
        objective, optimizers, pools=pools, seed=0, accumulate=config.accumulate, state_shardings=state_shardings
    )
    return Step(run, state, frozen, partial(_batch, shape))


def _weights(model: ModelConfig, dtype: jnp.dtype) -> DecoderParams:
    """Random, and every layer the same: a GPU's compiler takes minutes over random numbers for each."""
    params = init_params(replace(model, num_layers=1), jax.random.key(0), dtype)
    return replace(params, layers=_stacked(params.layers[0], model))


def _stacked(layer: Any, model: ModelConfig) -> Any:
    return Stacked(jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (model.num_layers, *leaf.shape)), layer))


def _frozen(model: ModelConfig, dtype: jnp.dtype) -> DecoderParams:
    return stack_layers(_weights(model, dtype))


def _batch(shape: Shape) -> Batch:
    """One document a row, of random tokens."""
    rows, length = shape.config.batch_size, shape.config.seq_len
    token_BS: Any = np.random.default_rng(0).integers(1, shape.model.vocab_size, (rows, length), dtype=np.int32)
    position_BS: Any = np.broadcast_to(np.arange(length, dtype=np.int32), token_BS.shape)
    one_BS: Any = np.ones(token_BS.shape, np.int32)
    return Batch(token_BS, one_BS, position_BS, one_BS == 0, one_BS == 1)


def _dense_distillation(shape: Shape) -> Objective:
    """The KL of the same model with full attention: `distill` without eviction and scorer."""
    model, remat, top_k = shape.model, shape.config.remat, shape.config.losses.top_k_logits

    def objective(weights, frozen, batch, pool_B, key):
        params = objectives.cast(weights["base"], shape.dtype)
        predicts_BS = losses.predicts(batch.segment_BS, batch.loss_BS)
        loss, agreement = losses.kl_to_teacher(
            objectives.dense_hidden(model, params, batch, remat=remat),
            partial(unembed, model, params),
            objectives.dense_hidden(model, frozen, batch),
            partial(unembed, model, frozen),
            predicts_BS,
            model.vocab_size,
            top_k=top_k,
        )
        return loss, {"kl": loss, "agreement": agreement, "terms/base": losses.terms(predicts_BS)}

    return objective


def abstract_step(shape: Shape) -> Any:
    """The step lowered for one device, from shapes alone."""
    step = build(shape)
    return step.run.lower(*(jax.eval_shape(make) for make in (step.state, step.frozen)), step.batch())


def measure(shape: Shape, mesh: Any, steps: int, *, profile: bool = False) -> str:
    """A row of the table, and below it, if wanted, the kernels of one more step."""
    with jax.set_mesh(mesh):
        parts = build(shape)
        state = sharding.make_on(mesh, parts.state)
        step = build(shape, jax.tree.map(lambda leaf: leaf.sharding, state)).run
        frozen, batch = sharding.make_on(mesh, parts.frozen), sharding.place(parts.batch(), mesh)
        begin = time.perf_counter()
        compiled = step.lower(state, frozen, batch).compile()
        compiling = time.perf_counter() - begin
        seconds = []
        for _ in range(steps + 2):
            begin = time.perf_counter()
            state, metrics = compiled(state, frozen, batch)
            loss = float(metrics["loss"])  # waits for the step
            seconds.append(time.perf_counter() - begin)
        kernels = kernel_times(lambda: compiled(state, frozen, batch)[1]["loss"], 1, most=60) if profile else []
    if not np.isfinite(loss):
        raise RuntimeError(f"method {shape.method}: the loss is {loss}")
    second = float(np.median(seconds[2:]))
    rows, length = shape.config.batch_size, shape.config.seq_len
    rate = rows * length / second
    peak = next((value for name, value in PEAK.items() if name in jax.devices()[0].device_kind), None)
    mfu = "-" if peak is None else f"{needed_flops(shape) / second / mesh.size / peak:.3f}"
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    held += memory.temp_size_in_bytes
    row = (
        f"| {shape.method} | {length} | {rows} | {second * 1e3:.1f} | {rate:.0f} | {rate / mesh.size:.0f} | {mfu} "
        f"| {held / 2**30:.2f} | {compiling:.0f} |"
    )
    return "\n    ".join([row, *kernels])


def needed_flops(shape: Shape) -> float:
    """FLOPs of a step over all devices, by the rules on top of this file."""
    model, rows, length = shape.model, shape.config.batch_size, shape.config.seq_len
    per_layer = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    per_layer += 3 * model.hidden_size * model.intermediate_size
    weights = 2 * rows * length * (model.num_layers * per_layer + model.hidden_size * model.vocab_size)

    def attention(most: int) -> float:
        seen = np.minimum(np.arange(1, length + 1), most).sum(dtype=np.float64)
        return 4 * model.head_dim * model.num_heads * model.num_layers * rows * seen

    dense = weights + attention(length)
    student = weights + attention(shape.config.policy.budgets[0]) if shape.method == "kvpop" else dense
    return 3 * student + (0 if shape.method == "pretrain" else dense)


if __name__ == "__main__":
    cli.run(main)
