"""Every policy of the literature against its literal NumPy form: outputs and kept tokens, step by step."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference.tiny_model import CONFIG
from oracles import assert_close
from policies.numpy_policies import METHODS, PROMPT, SINKS, STEPS, WINDOW, Row

from kvpop_jax import policies
from kvpop_jax.eviction import token_layout
from kvpop_jax.models.rope import unscaled_frequencies
from kvpop_jax.policies import NewToken, PolicySettings, Prompt, read_prompt

SETTINGS = PolicySettings(sinks=SINKS, window=WINDOW, methods=METHODS)
KV_HEADS, DIM, BUDGET, LONGEST, NEW = 2, 8, 16, 32, 14
ENTRY_BYTES = 2 * DIM * 4
FREQUENCY_D2 = unscaled_frequencies(DIM, 100.0)
# One token, below the budget, just filling it, far above; one whose scores are all equal; two whose prompt is pinned.
LENGTH_B = np.array([1, 9, 16, 27, 32, 32, 5, 1])
TIED, PINNED_B = 4, np.where(np.arange(8) < 6, 0, LENGTH_B)
SEED_B = np.arange(8) + 3
PAIRS = ["dense+h2o", "adakv+d2o", "tova+cam", "keydiff+knorm", "d2o+adakv"]
# Those that compare what the heads of a group attend to.
BY_GROUP = ["h2o", "snapkv", "expected_attention", "tova", "rkv"]
CORE = ("h2o", "snapkv")


def tensors(groups: int) -> list[np.ndarray]:
    """q, k and v of whole rows."""
    rng = np.random.default_rng(groups)
    shape = len(LENGTH_B), LONGEST + NEW
    q_BTHD, k_BTKD, v_BTKD = (
        scale * rng.normal(size=(*shape, heads, DIM))
        for scale, heads in ((1.5, groups * KV_HEADS), (1, KV_HEADS), (1, KV_HEADS))
    )
    q_BTHD[TIED], k_BTKD[TIED], k_BTKD[TIED, ..., 0] = 0, 0, 1
    return [x.astype(np.float32) for x in (q_BTHD, k_BTKD, v_BTKD)]


@cache
def compiled(name: str, groups: int):
    """Plan, and the whole of one layer: rows of q, k, v, length, pinned, seed -> outputs and positions."""
    config = replace(CONFIG, num_heads=groups * KV_HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    policy = policies.make(name, SETTINGS)
    plan = policy.plan(BUDGET, config, ENTRY_BYTES)

    @jax.jit
    def run(q_BTHD, k_BTKD, v_BTKD, length_B, pinned_B, seed_B):
        frequency_D2 = jnp.asarray(FREQUENCY_D2, jnp.float32)
        B, index_S, row_B = len(length_B), jnp.arange(LONGEST), jnp.arange(len(length_B))
        unread_BS1 = jnp.full((B, LONGEST, 1), jnp.nan)

        def prompt_under(plan):
            layout = token_layout(
                (index_S < length_B[:, None]).astype(jnp.int32),
                sinks=plan.sinks,
                pool=plan.pool,
                prompt_BS=index_S < pinned_B[:, None],
            )
            qkv = (x[:, :LONGEST] for x in (q_BTHD, k_BTKD, v_BTKD))
            return Prompt(jnp.zeros((B, LONGEST), int), unread_BS1, *qkv, layout, seed_B, 0, frequency_D2)

        def step(cache, n):
            position_B = length_B + n
            qkv = (x[row_B, position_B] for x in (q_BTHD, k_BTKD, v_BTKD))
            at_least_sinks_B = jnp.maximum(pinned_B, plan.sinks)
            new = NewToken(
                seed_B, position_B, at_least_sinks_B, seed_B, unread_BS1[:, 0], *qkv, 0, frequency_D2
            )  # fmt: skip
            o_BHD, cache = policy.step(None, cache, new, plan)
            return cache, (o_BHD, cache.position_BKC)

        o_BSHD, cache = read_prompt(policy, None, prompt_under, plan)
        first_BKC = cache.position_BKC
        _, (o_nBHD, position_nBKC) = jax.lax.scan(step, cache, jnp.arange(NEW))
        return o_BSHD, o_nBHD, jnp.concatenate([first_BKC[None], position_nBKC])

    return plan, run


def assert_is(name: str, groups: int):
    """Outputs and kept tokens of every row are those of the literal form."""
    q_BTHD, k_BTKD, v_BTKD = tensors(groups)
    plan, run = compiled(name, groups)
    o_BSHD, o_nBHD, position_nBKC = map(
        np.asarray, run(q_BTHD, k_BTKD, v_BTKD, *map(jnp.asarray, (LENGTH_B, PINNED_B, SEED_B)))
    )
    prefill, decode = (name.split("+") * 2)[:2]
    for b, length in enumerate(LENGTH_B):
        stop = length + NEW
        wide = (x[b, :stop].astype(np.float64) for x in (q_BTHD, k_BTKD, v_BTKD))
        row = Row(*wide, int(length), int(PINNED_B[b]), FREQUENCY_D2, int(SEED_B[b]))
        wanted_o, held = PROMPT[prefill](row, BUDGET)
        assert_close(o_BSHD[b, :length], wanted_o, 2e-5)
        for n, (wanted, held) in enumerate(STEPS[decode](row, held, BUDGET)):  # noqa: B020
            kept = [sorted(p for p in slots if p >= 0) for slots in position_nBKC[n, b].tolist()]
            assert kept == [[e.position for e in entries] for entries in held], (b, n)
            assert all(kept) and sum(map(len, kept)) <= KV_HEADS * plan.slots
            if wanted is not None:
                assert_close(o_nBHD[n - 1, b], wanted, 2e-5)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        *(pytest.param(name, 1, marks=[pytest.mark.core] * (name in CORE)) for name in STEPS),
        *((name, 4) for name in BY_GROUP),
    ],
)
def test_outputs_and_kept_tokens_are_those_of_the_literal_form(name, groups):
    assert_is(name, groups)


@pytest.mark.parametrize("name", PAIRS)
def test_a_prompt_cut_by_one_policy_goes_on_under_another(name):
    assert_is(name, 1)


@pytest.mark.parametrize("name", [*STEPS, *PAIRS])
def test_a_row_does_not_depend_on_its_neighbours(name):
    rows = [*tensors(1), LENGTH_B, PINNED_B, SEED_B]
    _, run = compiled(name, 1)
    order = np.array([3, 3, 7, 1, 0, 0, 6, 2])
    alone, together = run(*map(jnp.asarray, rows)), run(*(jnp.asarray(x[order]) for x in rows))
    for b, length in enumerate(LENGTH_B[order]):
        np.testing.assert_array_equal(together[2][:, b], alone[2][:, order[b]])
        assert_close(together[0][b, :length], np.asarray(alone[0])[order[b], :length], 1e-6)
        assert_close(together[1][:, b], np.asarray(alone[1])[:, order[b]], 1e-6)
