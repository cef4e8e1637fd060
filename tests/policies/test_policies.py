"""Every policy of the literature against its literal NumPy form: outputs and kept tokens, step by step."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference.tiny_model import CONFIG
from oracles import assert_close
from policies.numpy_policies import PROMPT, STEPS
from policies.numpy_rows import METHODS, SINKS, WINDOW, Row

from kvpop_jax import policies
from kvpop_jax.eviction import token_layout
from kvpop_jax.models.rope import unscaled_frequencies
from kvpop_jax.policies import NewToken, PolicySettings, Prompt, read_prompt

pytestmark = pytest.mark.literal

SETTINGS = PolicySettings(sinks=SINKS, window=WINDOW, methods=METHODS)
KV_HEADS, DIM, BUDGET, LONGEST, NEW = 2, 8, 16, 32, 14
ENTRY_BYTES = 2 * DIM * 4
FREQUENCY_D2 = unscaled_frequencies(DIM, 100.0)
# One token, below the budget, just filling it, far above; one whose scores are all equal; two whose prompt is pinned.
LENGTH_B = np.array([1, 9, 16, 27, 32, 32, 5, 1])
TIED, PINNED_B = 4, np.where(np.arange(8) < 6, 0, LENGTH_B)
SEED_B = np.arange(8) + 3
ALL_STEPS_B = np.full(8, NEW)
PAIRS = ["dense+h2o", "adakv+d2o", "tova+cam", "keydiff+knorm"]
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


# Compiled apart and shared by all: compiling is all that these tests cost.
@jax.jit
def lay_out(length_B, pinned_B, sinks, pool):
    index_S = jnp.arange(LONGEST)
    segment_BS = (index_S < length_B[:, None]).astype(jnp.int32)
    return token_layout(segment_BS, sinks=sinks, pool=pool, prompt_BS=index_S < pinned_B[:, None])


@cache
def compiled(name: str, groups: int):
    """Plan, and the whole of one layer: rows of q, k, v, length, pinned, seed, steps -> outputs and positions."""
    config = replace(CONFIG, num_heads=groups * KV_HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    policy = policies.make(name, SETTINGS)
    plan = policy.plan(BUDGET, config, ENTRY_BYTES).aligned(1 if groups == 1 else 7)  # Closed slots change nothing.
    frequency_D2 = FREQUENCY_D2.astype(np.float32)

    @jax.jit
    def run(q_BTHD, k_BTKD, v_BTKD, length_B, pinned_B, seed_B, steps_B, layouts):
        row_B = jnp.arange(len(length_B))
        unread_BS1 = jnp.full((len(length_B), LONGEST, 1), jnp.nan)

        def prompt_under(part):
            qkv = (x[:, :LONGEST] for x in (q_BTHD, k_BTKD, v_BTKD))
            tokens_BS = jnp.zeros(unread_BS1.shape[:2], jnp.int32)
            layout = layouts[part is plan]
            return Prompt(tokens_BS, unread_BS1, *qkv, layout, seed_B, 0, frequency_D2)

        def step(cache, n):
            position_B = length_B + n
            qkv = (x[row_B, position_B] for x in (q_BTHD, k_BTKD, v_BTKD))
            at_least_sinks_B = jnp.maximum(pinned_B, plan.sinks)
            own_B, hidden_B1 = n < steps_B, unread_BS1[:, 0]
            new = NewToken(seed_B, position_B, at_least_sinks_B, own_B, seed_B, hidden_B1, *qkv, 0, frequency_D2)
            o_BHD, cache = policy.step(None, cache, new, plan)
            return cache, (o_BHD, cache.position_BKC)

        o_BSHD, cache = read_prompt(policy, None, prompt_under, plan)
        first_BKC = cache.position_BKC
        _, (o_nBHD, position_nBKC) = jax.lax.scan(step, cache, jnp.arange(NEW))
        return o_BSHD, o_nBHD, jnp.concatenate([first_BKC[None], position_nBKC])

    return plan, run


def outcome(name: str, groups: int, order: np.ndarray, steps_B: np.ndarray = ALL_STEPS_B):
    """Outputs of the prompts and of the steps, and positions, of the rows in that order, which end after `steps`."""
    plan, run = compiled(name, groups)
    rows = [jnp.asarray(x[order]) for x in (*tensors(groups), LENGTH_B, PINNED_B, SEED_B, steps_B)]
    layouts = [lay_out(*rows[3:5], part.sinks, part.pool) for part in (plan.for_prompt, plan)]
    return map(np.asarray, run(*rows, layouts))


def assert_is(name: str, groups: int):
    """Outputs and kept tokens of every row are those of the literal form."""
    plan, _ = compiled(name, groups)
    o_BSHD, o_nBHD, position_nBKC = outcome(name, groups, np.arange(len(LENGTH_B)))
    prefill, decode = (name.split("+") * 2)[:2]
    # What lets the most that were live be counted only now and then.
    assert policies.make(name, SETTINGS).shrinks or np.all(np.diff((position_nBKC >= 0).sum(-1), axis=0) >= 0)
    for b, length in enumerate(LENGTH_B):
        wide = (x[b, : length + NEW].astype(np.float64) for x in tensors(groups))
        row = Row(*wide, int(length), int(PINNED_B[b]), FREQUENCY_D2, int(SEED_B[b]))
        wanted_o, held = PROMPT[prefill](row, BUDGET)
        assert_close(o_BSHD[b, :length], wanted_o, 2e-5)
        for n, (wanted, held) in enumerate(STEPS[decode](row, held, BUDGET)):  # noqa: B020
            kept = [sorted(p for p in slots if p >= 0) for slots in position_nBKC[n, b].tolist()]
            assert kept == [[e.position for e in entries] for entries in held], (b, n)
            assert all(kept) and sum(map(len, kept)) <= KV_HEADS * (plan.slots if "rkv" in name else plan.capacity)
            if wanted is not None:
                assert_close(o_nBHD[n - 1, b], wanted, 2e-5)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.core] * (name in CORE)) for name in STEPS])
def test_outputs_and_kept_tokens_are_those_of_the_literal_form(name, groups):
    assert_is(name, groups)


@pytest.mark.parametrize("name", PAIRS)
def test_a_prompt_cut_by_one_policy_goes_on_under_another(name):
    assert_is(name, 1)


@pytest.mark.parametrize("name", [*STEPS, *PAIRS])
def test_a_row_does_not_depend_on_its_neighbours(name):
    order = np.array([3, 3, 7, 1, 0, 0, 6, 2])
    o_BSHD, o_nBHD, position_nBKC = outcome(name, 1, np.arange(len(LENGTH_B)))
    o_other_BSHD, o_other_nBHD, position_other_nBKC = outcome(name, 1, order)
    np.testing.assert_array_equal(position_other_nBKC, position_nBKC[:, order])
    assert_close(o_other_BSHD, o_BSHD[order], 1e-6)
    assert_close(o_other_nBHD, o_nBHD[:, order], 1e-6)


@pytest.mark.parametrize("name", STEPS)
def test_a_row_that_has_ended_keeps_the_tokens_it_has_and_changes_no_other(name):
    steps_B = np.where(np.arange(8) % 2, NEW, np.arange(8))
    _, o_nBHD, position_nBKC = outcome(name, 1, np.arange(8))
    _, o_ended_nBHD, position_ended_nBKC = outcome(name, 1, np.arange(8), steps_B)
    for b, steps in enumerate(steps_B):
        np.testing.assert_array_equal(position_ended_nBKC[: steps + 1, b], position_nBKC[: steps + 1, b])
        np.testing.assert_array_equal(position_ended_nBKC[steps:, b], position_nBKC[[steps] * (NEW + 1 - steps), b])
        assert_close(o_ended_nBHD[:steps, b], o_nBHD[:steps, b], 1e-6)
    assert np.all(np.isfinite(o_ended_nBHD))
