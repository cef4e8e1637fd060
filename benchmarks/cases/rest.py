"""What surrounds attention: expiry from priorities, the scorer's memory, and a policy's work in a decode step."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvpop_jax.cache import CachePlan, LayerCache
from kvpop_jax.eviction import expiry_from_priority, token_layout
from kvpop_jax.policies import PolicySettings, make
from kvpop_jax.policies.machinery.base import NewToken
from kvpop_jax.scorers import MLSTMSettings, ScorerDims, mlstm_scorer
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.masked_attention import masked_attention
from pallas_kernels.mlstm_chunkwise import gpu, mlstm_chunkwise, mlstm_initial_state

Arguments = tuple[Any, ...]
Fields = dict[str, Any]
"""The fields of `kernels.Case`, which this module does not import."""


def cutoff_expiry_cases(real: bool) -> Iterator[Fields]:
    """Ranks and expiry of 8 heads, for 4,096 entries; against a cache that deletes, query by query."""
    K, window = (8, 256) if real else (2, 16)
    for S, pool in ((16_384, 3836), (131_072, 3836)) if real else ((300, 40),):

        def inputs(seed: int, S: int = S) -> Arguments:
            return (jax.random.normal(jax.random.key(seed), (1, K, S)),)

        def run(priority_BKS: jax.Array, form: str, S: int = S, pool: int = pool) -> Arguments:
            layout = token_layout(jnp.ones((1, S), jnp.int32), sinks=4, pool=pool)
            expiry_BKS = expiry_from_priority(priority_BKS, layout, window)
            # The next run must wait for this one.
            return jnp.minimum(expiry_BKS, S), priority_BKS + 1e-3 * (expiry_BKS & 1)

        def reference(priority_BKS: jax.Array, pool: int = pool) -> jax.Array:
            return _deleting_cache(priority_BKS[0], 4, window, pool)[None]

        yield dict(
            op="cutoff_expiry", shape=f"S {S}, K {K}, pool {pool}", inputs=inputs, carry={1: 0}, forms=("xla",),
            run=run, reference=reference, bytes=2 * 4 * K * S, runs=8,
        )  # fmt: skip


def _deleting_cache(priority_KS: jax.Array, sinks: int, window: int, pool: int) -> jax.Array:
    K, S = priority_KS.shape
    head_K = jnp.arange(K)

    def arrive(carry: Arguments, q: jax.Array) -> tuple[Arguments, None]:
        token_KP, weight_KP, expiry_KS = carry
        t = q - window
        # Slot `pool` takes the newcomer; the weakest goes out of the way, the youngest of equals.
        token_KP = token_KP.at[:, pool].set(t)
        weight_KP = weight_KP.at[:, pool].set(jnp.where(t >= sinks, priority_KS[:, t], jnp.inf))
        lowest_KP = weight_KP == weight_KP.min(-1, keepdims=True)
        slot_K = jnp.argmax(jnp.where(lowest_KP, token_KP, -2), axis=-1)
        victim_K = token_KP[head_K, slot_K]
        gone_K = (victim_K >= 0) & (t >= sinks)
        expiry_KS = expiry_KS.at[head_K, jnp.where(gone_K, victim_K, S)].set(q, mode="drop")
        token_KP = token_KP.at[head_K, slot_K].set(token_KP[:, pool])
        weight_KP = weight_KP.at[head_K, slot_K].set(weight_KP[:, pool])
        return (jnp.where(t >= sinks, token_KP, carry[0]), jnp.where(t >= sinks, weight_KP, carry[1]), expiry_KS), None

    # Empty slots go first.
    start = jnp.full((K, pool + 1), -1), jnp.full((K, pool + 1), -jnp.inf), jnp.full((K, S), S)
    return lax.scan(arrive, start, jnp.arange(window, S))[0][2]


def mlstm_chunkwise_cases(real: bool) -> Iterator[Fields]:
    """Forward and backward of 8 heads of 64 x 128; and, to hold it against, dense attention of 32 heads of 128."""
    S, K, X, Y, H, D = (16_384, 8, 64, 128, 32, 128) if real else (200, 2, 8, 16, 4, 16)
    ones_BS, initial = jnp.ones((1, S), jnp.int32), mlstm_initial_state(1, K, X, Y)

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

    arguments = *jax.eval_shape(inputs, 0), initial, ones_BS, 128
    taken = jax.default_backend() == "gpu" and gpu.refuses(*arguments) is None
    yield dict(
        op="mlstm_chunkwise", shape=f"forward and backward, S {S}, K {K}, {X} x {Y}", inputs=inputs,
        carry={n + 1: n for n in range(5)}, forms=("gpu", "reference") if taken else ("reference",), run=run,
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


def policy_step_cases(real: bool) -> Iterator[Fields]:
    """One layer's step under KVpop; and beside it its attention alone: what is left is the policy's work."""
    K, G, D, E, window = (8, 4, 128, 4096, 256) if real else (2, 4, 64, 64, 8)
    scorer = mlstm_scorer(MLSTMSettings(), ScorerDims(E, K, D))
    policy = make("kvpop", PolicySettings(4, window, scorer))
    for B, C in ((1, 4096), (32, 4096)) if real else ((2, 64),):
        plan = CachePlan(C, 4, window, C - 4 - window, 0, 0)

        def inputs(seed: int, B: int = B, C: int = C) -> Arguments:
            keys = jax.random.split(jax.random.key(seed), 8)
            shapes = (B, K, C, D), (B, K, C, D), (B, K * G, D), (B, K, D), (B, K, D), (B, E)
            k, v, q, k_new, v_new, hidden = (
                jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys[:6], shapes, strict=True)
            )
            position_BKC = jnp.tile(jnp.arange(C), (B, K, 1))
            window_BKC = (position_BKC < 4) | (position_BKC >= C - window)
            priority_BKC = jnp.where(window_BKC, jnp.inf, jax.random.normal(keys[6], (B, K, C)))
            # Slots are positions here; the ring names that of position p at p mod w.
            ring_BKW = jnp.tile(C - window + (jnp.arange(window) - C) % window, (B, K, 1))
            cache = LayerCache(k, v, position_BKC, priority_BKC, ring_BKW, scorer.init_state(B, window))
            return q, cache, k_new, v_new, hidden, jnp.full(B, C), scorer.init(keys[7])

        def step(*arguments: Any, form: str, plan: CachePlan = plan) -> Arguments:
            q_BHD, cache, k_BKD, v_BKD, hidden_BE, position_B, params = arguments
            unused_B = jnp.zeros_like(position_B)
            rotation_D2 = jnp.zeros(D // 2)
            new = NewToken(unused_B, position_B, unused_B + 4, unused_B, hidden_BE, q_BHD, k_BKD, v_BKD, 0, rotation_D2)
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
