"""What surrounds attention: expiry from priorities, the scorer's memory, and a policy's work in a decode step."""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvpop_jax.cache import CachePlan, LayerCache
from kvpop_jax.eviction import expiry_from_priority, token_layout
from kvpop_jax.policies import PolicySettings, make
from kvpop_jax.policies.machinery.base import NewToken
from kvpop_jax.scorers import MLSTMSettings, ScorerDims, mlstm_scorer
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.masked_attention import masked_attention
from pallas_kernels.mlstm_chunkwise import mlstm_chunkwise
from pallas_kernels.split_qkv import split_qkv
from pallas_kernels.take_slot import gpu as take_slot_gpu
from pallas_kernels.take_slot import take_slot
from pallas_kernels.thin_matmul import matmul_add, norm_matmul, norm_swiglu

Arguments = tuple[Any, ...]
Fields = dict[str, Any]
"""The fields of `kernels.Case`, which this module does not import."""

_SINKS = 4


def cutoff_expiry_cases(real: bool) -> Iterator[Fields]:
    """Ranks and expiry of 8 heads, for 4,096 entries; against a cache that deletes, query by query."""
    K, window = (8, 256) if real else (2, 16)
    for S, pool in ((16_384, 3836), (131_072, 3836)) if real else ((300, 40),):

        def inputs(seed: int, S: int = S) -> Arguments:
            return (jax.random.normal(jax.random.key(seed), (1, K, S)),)

        def run(priority_BKS: jax.Array, form: str, S: int = S, pool: int = pool) -> Arguments:
            layout = token_layout(jnp.ones((1, S), jnp.int32), sinks=_SINKS, pool=pool)
            expiry_BKS = expiry_from_priority(priority_BKS, layout, window)
            # The next run must wait for this one.
            return jnp.minimum(expiry_BKS, S), priority_BKS + 1e-3 * (expiry_BKS & 1)

        def reference(priority_BKS: jax.Array, pool: int = pool) -> jax.Array:
            result = jax.ShapeDtypeStruct(priority_BKS.shape, jnp.int32)
            return jax.pure_callback(partial(_deleting_cache, window=window, pool=pool), result, priority_BKS)

        yield dict(
            op="cutoff_expiry", shape=f"S {S}, K {K}, pool {pool}", inputs=inputs, carry={1: 0}, forms=("xla",),
            run=run, reference=reference, bytes=2 * 4 * K * S, runs=4,
        )  # fmt: skip


def _deleting_cache(priority_BKS: np.ndarray, window: int, pool: int) -> np.ndarray:
    """When each token is deleted: of too many that have left the window, the weakest goes, the youngest of equals."""
    expiry_BKS = np.full(priority_BKS.shape, priority_BKS.shape[-1], np.int32)
    for expiry_S, priority_S in zip(expiry_BKS[0], np.asarray(priority_BKS[0]).tolist(), strict=True):
        kept: list[tuple[float, int]] = []
        for token in range(_SINKS, len(priority_S) - window):
            heapq.heappush(kept, (priority_S[token], -token))
            if len(kept) > pool:
                expiry_S[-heapq.heappop(kept)[1]] = token + window
    return expiry_BKS


def mlstm_chunkwise_cases(real: bool) -> Iterator[Fields]:
    """Forward and backward of 8 heads of 64 x 128; and, to hold it against, dense attention of 32 heads of 128."""
    S, K, X, Y, H, D = (16_384, 8, 64, 128, 32, 128) if real else (200, 2, 8, 16, 4, 16)
    ones_BS = jnp.ones((1, S), jnp.int32)

    def inputs(seed: int) -> Arguments:
        keys = jax.random.split(jax.random.key(seed), 5)
        q, k, v = (jax.random.normal(key, (1, S, K, size)) for key, size in zip(keys[:3], (X, X, Y), strict=True))
        i, f = (jax.random.normal(key, (1, S, K)) for key in keys[3:])
        return q * X**-0.5, k, v, i, f + 6

    def run(*arguments: Any, form: str) -> Arguments:
        h, pull = jax.vjp(
            lambda q, k, v, i, f: mlstm_chunkwise(q, k, v, i, f, None, ones_BS, backend=form)[0], *arguments
        )
        # Not to be left out, and the next run waits for them.
        return h, *(x + 0 * dx for x, dx in zip(arguments, pull(h), strict=True))

    yield dict(
        op="mlstm_chunkwise", shape=f"forward and backward, S {S}, K {K}, {X} x {Y}", inputs=inputs,
        carry={n + 1: n for n in range(5)}, forms=_on_a_gpu(), run=run,
        reference=lambda q, k, v, i, f: mlstm_chunkwise(q, k, v, i, f, None, ones_BS, chunk=32, backend="reference")[0],
        bytes=2 * 4 * S * K * (2 * X + Y + 2) + 4 * S * K * Y, runs=4,
    )  # fmt: skip

    def attention_inputs(seed: int) -> Arguments:
        keys = jax.random.split(jax.random.key(seed), 3)
        shapes = (1, S, H, D), (1, S, K, D), (1, S, K, D)
        return tuple(jax.random.normal(key, x, jnp.bfloat16) for key, x in zip(keys, shapes, strict=True))

    def attend(*arguments: Any, form: str) -> Arguments:
        def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=form)  # type: ignore[call-overload]

        o, pull = jax.vjp(dense, *arguments)
        return o, *(x + 0 * dx for x, dx in zip(arguments, pull(o), strict=True))

    def dense_reference(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return masked_attention(q, k, v, None, None, backend="reference")[0]

    yield dict(
        op="mlstm_chunkwise", shape=f"beside it dense attention, forward and backward, S {S}, H {H}, K {K}, D {D}",
        inputs=attention_inputs, carry={n + 1: n for n in range(3)}, forms=("cudnn" if real else "xla",), run=attend,
        reference=dense_reference, bytes=2 * 2 * S * D * (2 * H + 2 * K), runs=4,
    )  # fmt: skip


def take_slot_cases(real: bool) -> Iterator[Fields]:
    """The books of a step, of full caches: batches, and the slots of a head from which one thread block is too few."""
    K, window = (8, 256) if real else (2, 8)
    for B, C in ((1, 4032), (1, 4096), (32, 4096), (1, 16_384), (32, 16_384), (1, 65_536)) if real else ((2, 64),):

        def inputs(seed: int, B: int = B, C: int = C) -> Arguments:
            keys = jax.random.split(jax.random.key(seed))
            position_BKC = jnp.tile(jnp.arange(C, dtype=jnp.int32), (B, K, 1))
            priority_BKC = jnp.where(position_BKC < C - window, jax.random.normal(keys[0], (B, K, C)), jnp.inf)
            numbers = position_BKC, priority_BKC, jnp.zeros((B, K, window), jnp.int32)
            rows = jnp.full(B, C), jnp.full(B, _SINKS), jnp.full(B, True)
            return *numbers, jax.random.normal(keys[1], (B, K)), *rows

        def run(*arguments: Any, form: str) -> Arguments:
            return *take_slot(*arguments, backend=form), arguments[4] + 1

        arguments = jax.eval_shape(inputs, 0)
        taken = jax.default_backend() == "gpu" and take_slot_gpu.refuses(*arguments) is None
        yield dict(
            op="take_slot", shape=f"B {B}, C {C}, K {K}", inputs=inputs, carry={0: 0, 1: 1, 2: 2, 4: 4},
            forms=("gpu", "reference") if taken else ("reference",), run=run,
            reference=lambda *arguments: take_slot(*arguments, backend="reference")[0], bytes=8 * B * K * C,
        )  # fmt: skip


def thin_matmul_cases(real: bool) -> Iterator[Fields]:
    """The products of a layer of Qwen3-8B in a decode step of few rows, with what surrounds each."""
    E, O, F = (4096, 6144, 12_288) if real else (256, 256, 256)
    for B in (1, 4, 8) if real else (1,):

        def arrays(seed: int, *shapes: tuple[int, ...]) -> Arguments:
            keys = jax.random.split(jax.random.key(seed), len(shapes))
            return tuple(jax.random.normal(key, x, jnp.bfloat16) * 0.1 for key, x in zip(keys, shapes, strict=True))

        def qkv(x: jax.Array, norm: jax.Array, w: jax.Array, form: str) -> Arguments:
            return norm_matmul(x, norm, w, eps=1e-6, backend=form)

        def hidden(x: jax.Array, norm: jax.Array, w: jax.Array, form: str) -> Arguments:
            h = norm_swiglu(x, norm, w, eps=1e-6, backend=form)
            return h, h[:, :E]  # the next run waits for this one

        def added(x: jax.Array, w: jax.Array, residual: jax.Array, form: str) -> Arguments:
            return (matmul_add(x, w, residual, backend=form),)

        kinds: list[tuple[str, Any, dict[int, int], tuple[tuple[int, ...], ...]]] = [
            ("norm and qkv", qkv, {0: 0}, ((B, E), (E,), (E, O))),
            ("norm, gate and up", hidden, {1: 0}, ((B, E), (E,), (E, 2, F))),
            ("down and residual", added, {0: 2}, ((B, F), (F, E), (B, E))),
            ("attention's output and residual", added, {0: 2}, ((B, E), (E, E), (B, E))),
        ]
        for name, run, carry, shapes in kinds:
            yield dict(
                op="thin_matmul", shape=f"{name}, B {B}, {shapes[-2] if run is added else shapes[-1]}",
                inputs=partial(lambda seed, shapes: arrays(seed, *shapes), shapes=shapes), carry=carry,
                forms=_on_a_gpu(), run=run, reference=partial(_wide, partial(run, form="reference")),
                bytes=2 * sum(math.prod(x) for x in shapes),
            )  # fmt: skip


def split_qkv_cases(real: bool) -> Iterator[Fields]:
    """Heads of Qwen3-8B, normed and turned."""
    K, J, D = (8, 6, 128) if real else (2, 4, 16)
    for B in (1, 8) if real else (2,):

        def inputs(seed: int, B: int = B) -> Arguments:
            keys = jax.random.split(jax.random.key(seed), 5)
            qkv, q_norm, k_norm = (
                jax.random.normal(key, x, jnp.bfloat16)
                for key, x in zip(keys[:3], ((B, K, J, D), (D,), (D,)), strict=True)
            )
            return qkv, *(jax.random.normal(key, (B, D // 2)) for key in keys[3:]), q_norm, k_norm

        def run(*arguments: Any, form: str) -> Arguments:
            qkv, cos, sin, q_norm, k_norm = arguments
            q, k, v = split_qkv(qkv, (cos, sin), q_norm, k_norm, eps=1e-6, backend=form)
            return q, k, v, cos + 0 * q[:, 0, : D // 2].astype(cos.dtype)  # the next run waits for this one

        yield dict(
            op="split_qkv", shape=f"B {B}, K {K}, J {J}, D {D}", inputs=inputs, carry={3: 1}, forms=_on_a_gpu(),
            run=run, reference=partial(_wide, lambda *x: run(*x, form="reference")[:3]), bytes=4 * B * K * J * D,
        )  # fmt: skip


def _on_a_gpu() -> tuple[str, ...]:
    return ("gpu", "reference") if jax.default_backend() == "gpu" else ("reference",)


def _wide(run: Callable[..., Any], *arguments: Any) -> Any:
    """The same in float32."""
    return run(*(x.astype(jnp.float32) for x in arguments))


def policy_step_cases(real: bool) -> Iterator[Fields]:
    """One layer's step under KVpop; and beside it its attention alone: what is left is the policy's work."""
    K, G, D, E, window = (8, 4, 128, 4096, 256) if real else (2, 4, 64, 64, 8)
    scorer = mlstm_scorer(MLSTMSettings(), ScorerDims(E, K, D))
    policy = make("kvpop", PolicySettings(_SINKS, window, scorer))
    for B, C in ((1, 4096), (32, 4096)) if real else ((2, 64),):
        plan = CachePlan(C, _SINKS, window, C - _SINKS - window, 0, 0)

        def inputs(seed: int, B: int = B, C: int = C) -> Arguments:
            keys = jax.random.split(jax.random.key(seed), 8)
            shapes = (B, K, C, D), (B, K, C, D), (B, K * G, D), (B, K, D), (B, K, D), (B, E)
            k, v, q, k_new, v_new, hidden = (
                jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys[:6], shapes, strict=True)
            )
            position_BKC = jnp.tile(jnp.arange(C), (B, K, 1))
            window_BKC = (position_BKC < _SINKS) | (position_BKC >= C - window)
            priority_BKC = jnp.where(window_BKC, jnp.inf, jax.random.normal(keys[6], (B, K, C)))
            # Slots are positions here; the ring names that of position p at p mod w.
            ring_BKW = jnp.tile(C - window + (jnp.arange(window) - C) % window, (B, K, 1))
            cache = LayerCache(k, v, position_BKC, priority_BKC, ring_BKW, scorer.init_state(B, window))
            return q, cache, k_new, v_new, hidden, jnp.full(B, C), scorer.init(keys[7])

        def step(*arguments: Any, form: str, plan: CachePlan = plan) -> Arguments:
            q_BHD, cache, k_BKD, v_BKD, hidden_BE, position_B, params = arguments
            unused_B = jnp.zeros_like(position_B)
            rotation_D2 = jnp.zeros(D // 2)
            tensors = hidden_BE, q_BHD, k_BKD, v_BKD
            own_B = jnp.full(position_B.shape, True)
            new = NewToken(unused_B, position_B, unused_B + _SINKS, own_B, unused_B, *tensors, 0, rotation_D2)
            o_BHD, cache = policy.step(params, cache, new, plan)
            return o_BHD, cache, position_B + 1

        def after_step(*arguments: Any, C: int = C) -> jax.Array:
            q_BHD, k_BKD, v_BKD = (arguments[n].astype(jnp.float32) for n in (0, 2, 3))
            cache = step(*arguments, form="kvpop")[1]
            k_BKCD, v_BKCD = (x.astype(jnp.float32) for x in (cache.k_BKCD, cache.v_BKCD))
            nowhere_BK = jnp.full(k_BKD.shape[:2], C)
            attended = k_BKCD, v_BKCD, cache.position_BKC, k_BKD, v_BKD, nowhere_BK
            return decode_attention(q_BHD, *attended, backend="reference")[0]

        def attend(*arguments: Any, form: str) -> Arguments:
            q_BHD, cache, k_BKD, v_BKD, *_ = arguments
            slot_BK = jnp.zeros(k_BKD.shape[:2], jnp.int32)
            o_BHD, _, k_BKCD, v_BKCD, _ = decode_attention(
                q_BHD, cache.k_BKCD, cache.v_BKCD, cache.position_BKC, k_BKD, v_BKD, slot_BK
            )
            return o_BHD, replace(cache, k_BKCD=k_BKCD, v_BKCD=v_BKCD)

        def attended(*arguments: Any) -> jax.Array:
            q_BHD, cache, k_BKD, v_BKD, *_ = arguments
            q_BHD, *caches = (x.astype(jnp.float32) for x in (q_BHD, cache.k_BKCD, cache.v_BKCD))
            slot_BK = jnp.zeros(k_BKD.shape[:2], jnp.int32)
            new = k_BKD.astype(jnp.float32), v_BKD.astype(jnp.float32)
            arguments = q_BHD, *caches, cache.position_BKC, *new, slot_BK
            return decode_attention(*arguments, backend="reference")[0]

        entries = 4 * B * K * C * D  # bytes of bfloat16 keys and values
        shape = f"B {B}, C {C}, K {K}, G {G}, D {D}"
        yield dict(
            op="policy_step", shape=f"a step, {shape}", inputs=inputs, carry={0: 0, 1: 1, 2: 5}, forms=("kvpop",),
            run=step, reference=after_step, bytes=entries,
        )  # fmt: skip
        yield dict(
            op="policy_step", shape=f"its attention alone, {shape}", inputs=inputs, carry={0: 0, 1: 1},
            forms=("attention",), run=attend, reference=attended, bytes=entries,
        )  # fmt: skip
