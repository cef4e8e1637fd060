"""Times one layer as KVpop trains it against the same layer with dense attention, forward and backward.

    python benchmarks/layer.py                                  # Qwen3-8B's, 16,384 tokens, 4,096 entries
    python benchmarks/layer.py --length 65536 --query_share 8 --output layer.json

All layers run through `kvpop_jax.training`, nothing recomputed, in bfloat16 from weights in float32, which are cast
inside as a step casts them; the scorer stays in float32. Gradients are those of the layer's weights, of what enters it
and of the scorer. A row is one document.

- `dense`: norms, projections, rotary embedding, dense attention of whole rows (cuDNN's on an NVIDIA GPU), feed-forward.
- `dense, documents`: the same with the attention that packed rows need, which is the teacher's.
- `kvpop, no loss`: attention under the policy: scores, expiry, attention to survivors, kept mass, which is logged.
- `kvpop`: the same with the loss of its scorer: future attention, the boundary loss and what is logged with it.

The layers take turns, so that their ratios come from the same minutes; times are medians. Memory is the compiler's:
arguments, results and temporaries of the pass forward and backward. On a CPU the sizes are small.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arguments import count
from decode import SHAPES
from jaxtyping import Array, Float

from kvpop_jax import cli
from kvpop_jax.config import LossConfig, ModelSource, PolicyConfig, TargetConfig, TrainConfig
from kvpop_jax.errors import UserError
from kvpop_jax.models import LayerInputs, ModelConfig, init_params
from kvpop_jax.training.data import Batch
from kvpop_jax.training.objectives import cast, dense_hidden
from kvpop_jax.training.scan import scan_layers
from kvpop_jax.training.setup_distill import configured_student
from kvpop_jax.training.student import student_hidden
from pallas_kernels.masked_attention import masked_attention

DENSE = "dense"
_BURST = 4  # runs queued at once, which hides what it takes to start one

Weights = dict[str, Any]
"""The layer's weights and the scorer's in float32; what enters the layer, one row per token."""
Layer = Callable[[Weights, Batch], tuple[Float[Array, "B S E"], Float[Array, ""]]]
"""What leaves the layer, and the loss of its scorer."""


@dataclass(frozen=True)
class Row:
    """One layer; milliseconds, and shares of the dense layer's."""

    layer: str
    forward_ms: float
    forward_of_dense: float
    both_ms: float
    both_of_dense: float
    gib: float

    def __str__(self) -> str:
        forward, both = f"{self.forward_ms:.4g} | {self.forward_of_dense:.3f}", f"{self.both_ms:.4g}"
        return f"| {self.layer} | {forward} | {both} | {self.both_of_dense:.3f} | {self.gib:.2f} |"


def main(argv: Sequence[str]) -> int:
    real = jax.default_backend() != "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3_8b" if real else "tiny", help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--length", type=count, default=16_384 if real else 512, help="tokens of a row")
    parser.add_argument("--batch", type=count, default=1, help="rows")
    parser.add_argument("--budget", type=count, default=4096 if real else 96, help="entries per KV head")
    parser.add_argument("--window", type=count, default=256 if real else 16)
    parser.add_argument("--query_share", type=float, default=1.0, help="of the queries that the target is taken from")
    parser.add_argument("--turns", type=count, default=9, help="timed, after one to warm up")
    parser.add_argument("--output", type=Path, help="JSON file to write as well")
    options = parser.parse_args(argv)
    if options.shape not in SHAPES:
        raise UserError(f"--shape {options.shape} is none of {', '.join(SHAPES)}")
    # One layer, and a row of "embeddings" for every token: what enters the layer.
    model = replace(SHAPES[options.shape], num_layers=1, vocab_size=options.batch * options.length, tie_embeddings=True)
    config = TrainConfig(
        name="benchmark", model=ModelSource(source="random"), seq_len=options.length, batch_size=options.batch,
        policy=PolicyConfig(window=options.window, budgets=(options.budget,)),
        losses=LossConfig(target=TargetConfig(query_share=options.query_share)),
    )  # fmt: skip
    print(
        f"{jax.devices()[0].device_kind}, JAX {jax.__version__}; one layer of {options.shape}, {options.batch} x "
        f"{options.length} tokens, {options.budget} entries, window {options.window}"
    )
    rows = measure(layers(model, config), weights_of(model, config), batch_of(config), options.turns)
    print("| layer | forward ms | of dense | forward and backward ms | of dense | GiB |\n" + "|---" * 6 + "|")
    print(*rows, sep="\n")
    if options.output is not None:
        about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "options": vars(options)}
        options.output.write_text(json.dumps(about | {"rows": list(map(vars, rows))}, indent=2, default=str) + "\n")
    return 0


def layers(model: ModelConfig, config: TrainConfig) -> dict[str, Layer]:
    """The layers by name, see above."""
    dtype = jnp.dtype(jnp.bfloat16)
    student, plans = configured_student(config, model, dtype)
    (plan,) = plans.values()

    def params(weights: Weights) -> Any:
        return cast(weights["base"], dtype)

    def dense(weights: Weights, batch: Batch):
        def attend(_layer: Any, _of_layer: Any, inputs: LayerInputs):
            return masked_attention(inputs.q_BTHD, inputs.k_BTKD, inputs.v_BTKD, None, None)[0], None

        hidden_BSE, _ = scan_layers(model, params(weights), batch.token_BS, batch.position_BS, attend)
        return hidden_BSE, jnp.float32(0)

    def dense_documents(weights: Weights, batch: Batch):
        return dense_hidden(model, params(weights), batch), jnp.float32(0)

    def under(student):
        def run(weights: Weights, batch: Batch):
            pool_B = jnp.full(batch.token_BS.shape[0], plan.pool, jnp.int32)
            arguments = params(weights), weights["scorer"], batch, pool_B, jax.random.key(0)
            hidden_BSE, measured = student_hidden(student, model, *arguments)
            # What is logged is returned, so that it is computed.
            logged = sum(jnp.sum(jax.lax.stop_gradient(x)) for x in measured.values())
            return hidden_BSE, measured.get("boundary", jnp.zeros(1)).mean() + 0 * logged

        return run

    return {
        DENSE: dense,
        "dense, documents": dense_documents,
        "kvpop, no loss": under(replace(student, scorer=None)),
        "kvpop": under(student),
    }


def weights_of(model: ModelConfig, config: TrainConfig) -> Weights:
    """Random ones; what enters the layer is in bfloat16."""
    student, _ = configured_student(config, model, jnp.dtype(jnp.bfloat16))
    assert student.scorer is not None, "the policy learns"
    base = init_params(model, jax.random.key(0), jnp.dtype(jnp.float32))
    entering_VE = jax.random.normal(jax.random.key(1), base.embedding_VE.shape, jnp.bfloat16)
    return {"base": replace(base, embedding_VE=entering_VE), "scorer": [student.scorer.init(jax.random.key(2))]}


def batch_of(config: TrainConfig) -> Batch:
    """Every token is another."""
    shape = config.batch_size, config.seq_len
    token_BS = jnp.arange(config.batch_size * config.seq_len, dtype=jnp.int32).reshape(shape)
    position_BS = jnp.broadcast_to(jnp.arange(config.seq_len, dtype=jnp.int32), shape)
    one_BS = jnp.ones(shape, jnp.int32)
    return Batch(token_BS, one_BS, position_BS, one_BS == 0, one_BS == 1)


def forward_of(layer: Layer) -> Any:
    """What leaves the layer, by a jitted function of weights, batch and cotangent."""
    return jax.jit(lambda weights, batch, _cotangent_BSE: layer(weights, batch))


def both_of(layer: Layer) -> Any:
    """The gradients under a given one of what leaves the layer, and under the scorer's loss."""

    def loss(weights: Weights, batch: Batch, cotangent_BSE: Array) -> Array:
        hidden_BSE, of_scorer = layer(weights, batch)
        return jnp.sum(hidden_BSE * cotangent_BSE, dtype=jnp.float32) + of_scorer

    return jax.jit(jax.value_and_grad(loss))


def measure(layers: dict[str, Layer], weights: Weights, batch: Batch, turns: int) -> list[Row]:
    """One row for each layer."""
    entering_VE = weights["base"].embedding_VE
    cotangent_BSE = entering_VE[batch.token_BS][:, ::-1]
    arguments = weights, batch, cotangent_BSE
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # XLA needs one core for each
        waiting = {
            (name, which): pool.submit(make(layer).lower(*arguments).compile)
            for name, layer in layers.items()
            for which, make in (("forward", forward_of), ("both", both_of))
        }
    programs = {key: program.result() for key, program in waiting.items()}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in programs}
    for _ in range(turns + 1):
        for key, program in programs.items():
            start = time.perf_counter()
            for _ in range(_BURST):
                result = program(*arguments)
            jax.block_until_ready(result)
            seconds[key].append((time.perf_counter() - start) / _BURST)
            value = result[1] if key[1] == "forward" else result[0]
            if not np.isfinite(value):
                raise RuntimeError(f"layer {key[0]}, {key[1]}: the loss is {value}")
            del result
    ms = {key: 1e3 * float(np.median(times[1:])) for key, times in seconds.items()}
    dense_forward, dense_both = ms[DENSE, "forward"], ms[DENSE, "both"]
    rows = []
    for name in layers:
        forward, both = ms[name, "forward"], ms[name, "both"]
        gib = _bytes(programs[name, "both"]) / 2**30
        rows.append(Row(name, forward, forward / dense_forward, both, both / dense_both, gib))
    return rows


def _bytes(program: Any) -> int:
    memory = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.temp_size_in_bytes


if __name__ == "__main__":
    cli.run(main)
