"""Attention under eviction, and the mass that keys receive, against dense causal attention by cuDNN.

The heads are those of Qwen3-8B; what is evicted is decided by random priorities, so that survivors are scattered. FLOPs
are those of the pairs of a query and a key that the operation is about: visible ones, or the causal half of all. Dense
attention's are its own: two products over the causal half forward, seven forward and backward.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvpop_jax.eviction import expiry_from_priority, token_layout
from pallas_kernels.masked_attention import gpu as attention_gpu
from pallas_kernels.masked_attention import masked_attention
from pallas_kernels.received_log_mass import gpu as mass_gpu
from pallas_kernels.received_log_mass import received_log_mass

Arguments = tuple[Any, ...]
Fields = dict[str, Any]
"""The fields of `kernels.Case`, which this module does not import."""

DENSE = "cudnn dense"
"""The form that others are held against; it computes something else, so it has no error here."""
_SINKS, _WINDOW = 4, 256
_REFERENCE_UP_TO = 16_384  # beyond, plain JAX takes seconds


def masked_attention_cases(real: bool) -> Iterator[Fields]:
    """Forward, and forward with backward, at the shapes that a training step has."""
    K, G, D = (8, 4, 128) if real else (1, 2, 64)
    sizes = [(16_384, 4096), (16_384, 2048), (65_536, 4096), (16_384, None)] if real else [(512, 96), (300, None)]
    for S, budget in sizes:
        window = _WINDOW if real else 16

        @partial(jax.jit, static_argnums=(1, 2, 3))
        def inputs(seed: int, S: int = S, budget: int | None = budget, window: int = window) -> Arguments:
            keys = jax.random.split(jax.random.key(seed), 5)
            shapes = (1, S, K * G, D), (1, S, K, D), (1, S, K, D), (1, S, K * G, D)
            q, k, v, do = (
                jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=False)
            )
            segment = jnp.ones((1, S), jnp.int32)
            if budget is None:
                return q, k, v, do, None, segment
            layout = token_layout(segment, sinks=_SINKS, pool=budget - _SINKS - window)
            # The law of a policy that draws at random at every step: young tokens rank as high as old ones.
            priority = jax.random.exponential(keys[4], (1, K, S)) + jnp.arange(S) / budget
            return q, k, v, do, expiry_from_priority(priority, layout, window), segment

        def forward(q, k, v, do, expiry, segment, form: str, budget: int | None = budget) -> Arguments:
            if form == DENSE:
                return (_dense(q, k, v),)
            return masked_attention(q, k, v, expiry, segment, capacity=budget, backend=form)

        def both(q, k, v, do, *rest, form: str, forward: Callable[..., Arguments] = forward) -> Arguments:
            o, pull = jax.vjp(lambda q, k, v: forward(q, k, v, do, *rest, form=form)[0], q, k, v)
            return *pull(do), o

        arguments = jax.eval_shape(inputs, 0)
        q, k, v, _, expiry, segment = arguments
        seen = S * S / 2 if budget is None else budget * (S - budget / 2)
        # Every gradient is taken up: what nobody reads is not computed.
        passes = ("forward", forward, 2, {0: 0}), ("forward and backward", both, 7, {0: 0, 1: 1, 2: 2})
        for name, run, matmuls, carry in passes:
            yield dict(
                op="masked_attention", shape=f"{name}, S {S}, B {budget or 'all'}, K {K}, G {G}, D {D}", inputs=inputs,
                carry=carry, forms=_forms(attention_gpu.refuses(q, k, v, expiry, segment, None, 0, budget), S),
                run=run, reference=_wide(run, 1 if name == "forward" else 3), bytes=_bytes(arguments), runs=1,
                flops=int(2 * matmuls * seen * K * G * D), baseline=DENSE, baseline_flops=matmuls * S * S * K * G * D,
            )  # fmt: skip


def received_log_mass_cases(real: bool) -> Iterator[Fields]:
    """All queries, and a sampled eighth of them."""
    K, G, D = (8, 4, 128) if real else (1, 2, 64)
    for S, share in [(16_384, 1), (65_536, 1), (65_536, 8)] if real else [(300, 1), (300, 4)]:

        @partial(jax.jit, static_argnums=(1, 2))
        def inputs(seed: int, S: int = S, share: int = share) -> Arguments:
            keys = jax.random.split(jax.random.key(seed), 3)
            q = jax.random.normal(keys[0], (1, S, K * G, D), jnp.bfloat16)
            k = jax.random.normal(keys[1], (1, S, K, D), jnp.bfloat16)
            # Of unit normal scores: the logarithm of their number, and half the variance.
            lse = jnp.broadcast_to(jnp.log1p(jnp.arange(S, dtype=jnp.float32)) + 0.5, (1, K * G, S))
            asks = jax.random.uniform(keys[2], (1, S)) * share < 1
            return q, k, lse, jnp.ones((1, S), jnp.int32), asks

        def run(q, k, lse, segment, asks, form: str, share: int = share) -> Arguments:
            if form == DENSE:
                o = _dense(q, k, k)
                return lse, o
            query = None if share == 1 else asks
            mass = received_log_mass(q, k, lse, segment, delay=_WINDOW if real else 16, query_BT=query, backend=form)
            return mass, q

        arguments = jax.eval_shape(inputs, 0)
        q, k, lse, segment, _ = arguments
        yield dict(
            op="received_log_mass", shape=f"S {S}, 1 of {share} queries, K {K}, G {G}, D {D}", inputs=inputs,
            carry={0: 2, 1: 0}, forms=_forms(mass_gpu.refuses(q, k, lse, segment, 0, None), S), run=run,
            reference=_wide(run, 1), bytes=_bytes(arguments), runs=1, flops=int(S * S / share * K * G * D),
            baseline=DENSE, baseline_flops=2 * S * S * K * G * D,
        )  # fmt: skip


def _forms(refused: str | None, S: int) -> tuple[str, ...]:
    """On a GPU the kernel, dense attention, and plain JAX where it does not take seconds."""
    if jax.default_backend() != "gpu":
        return ("reference",)
    kernel = () if refused is not None else ("gpu",)
    return (*kernel, DENSE, *(("reference",) if S <= _REFERENCE_UP_TO else ()))


def _dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _wide(run: Callable[..., Arguments], compared: int) -> Callable[..., Arguments]:
    """The first results of the reference, in float32."""

    def reference(*arguments: jax.Array) -> Arguments:
        wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arguments)
        return run(*wide, form="reference")[:compared]

    return reference


def _bytes(arguments: Arguments) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arguments))
