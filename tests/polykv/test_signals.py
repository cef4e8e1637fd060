"""Replayed signals against the whole model decoding with one layer under the policy."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference.tiny_model import CONFIG, ENTRY_BYTES, distinct_tokens, make_policy, random_scorer, tiny_model
from oracles import assert_close

from kvpop_jax.inference import Generator
from kvpop_jax.models import forward
from kvpop_jax.policies import compose
from kvpop_jax.polykv.measure import Candidate, alone, measure
from kvpop_jax.polykv.signals import make_replay, read_reference
from kvpop_jax.training.scan import stack_layers

pytestmark = pytest.mark.literal

PROMPT, LENGTH, BUDGET, ROWS = 28, 40, 14, 2
TOKEN_BT = distinct_tokens(ROWS, LENGTH)
SEEDS = [7, 8]
N = CONFIG.num_layers


@pytest.fixture(scope="module")
def stacked():
    return stack_layers(tiny_model().params)


@pytest.fixture(scope="module")
def reference(stacked):
    return read_reference(CONFIG, stacked, jnp.asarray(TOKEN_BT), prompt=PROMPT)


@cache
def replay_of(name, phase, budget):
    policy = alone(make_policy(name), make_policy("dense"), phase, budget)
    plan = policy.plan(LENGTH if phase == "prefill" else budget, CONFIG, ENTRY_BYTES)
    changes = phase == "prefill" and make_policy(name).prefill_mode == "expiry"
    return make_replay(CONFIG, policy, plan, prompt=PROMPT, prompt_changes=changes, perplexity=True)


def replayed(name, phase, budget, layer, stacked, reference):
    run = replay_of(name, phase, budget)
    return run(stacked, own_of(name, phase, layer), reference, jnp.int32(layer), jnp.asarray(SEEDS))


def own_of(name, phase, layer):
    own = random_scorer(name, layer)
    return None if own is None else {"prefill": (own, None), "decode": (None, own)}[phase]


def decoded_nll(name, phase, layer):
    """The slow way: the generator reads the text, that layer under the policy and the others with full caches."""
    dense = make_policy("dense")
    policy = alone(make_policy(name), dense, phase, BUDGET)
    generator = Generator(
        tiny_model(),
        [policy if n == layer else dense for n in range(N)],
        [BUDGET if n == layer and phase == "decode" else LENGTH for n in range(N)],
        scorers=[own_of(name, phase, n) if n == layer else None for n in range(N)],
    )
    logits = list(generator.teacher_forced(TOKEN_BT, PROMPT, SEEDS))[1:]
    log_prob_CBV = jax.nn.log_softmax(jnp.stack(logits))
    return -np.take_along_axis(np.asarray(log_prob_CBV), TOKEN_BT[:, PROMPT + 1 :].T[..., None], axis=-1)[..., 0].T


def test_the_reference_is_the_dense_model(reference):
    log_prob_BTV = jax.nn.log_softmax(forward(CONFIG, tiny_model().params, jnp.asarray(TOKEN_BT)))
    wanted_BC = -np.take_along_axis(np.asarray(log_prob_BTV[:, PROMPT:-1]), TOKEN_BT[:, PROMPT + 1 :, None], axis=-1)[
        ..., 0
    ]
    assert_close(np.asarray(reference.nll_BC), wanted_BC, 2e-5)
    assert_close(np.asarray(reference.attended_NT).sum(axis=1), np.ones(N), 1e-5)


@pytest.mark.parametrize(
    ("name", "phase", "layer"),
    [("tova", "prefill", 0), ("h2o", "decode", 1), ("kvpop", "prefill", 0), ("kvpop", "decode", 0)],
)
def test_a_replayed_layer_predicts_as_the_whole_model_with_that_layer_under_the_policy(
    name, phase, layer, stacked, reference
):
    cosine_BC, nll_BC = replayed(name, phase, BUDGET, layer, stacked, reference)
    assert_close(np.asarray(nll_BC), decoded_nll(name, phase, layer), 1e-4)
    # And the eviction was felt, or this compared the dense model with itself.
    assert np.abs(np.asarray(nll_BC - reference.nll_BC)).max() > 1e-3
    assert np.asarray(cosine_BC).min() < 0.999


def test_a_budget_that_holds_the_text_changes_nothing(stacked, reference):
    cosine_BC, nll_BC = replayed("streaming_llm", "decode", LENGTH, 1, stacked, reference)
    assert_close(np.asarray(cosine_BC), np.ones_like(cosine_BC), 1e-5)
    assert_close(np.asarray(nll_BC), np.asarray(reference.nll_BC), 1e-4)


def test_batches_are_averaged_and_dense_costs_nothing():
    texts = distinct_tokens(2 * ROWS, LENGTH)
    candidate = {"tova": Candidate(make_policy("tova"), None)}
    candidates = {"prefill": {"dense": Candidate(make_policy("dense"), None)}, "decode": candidate}
    run = partial(
        measure, tiny_model(), candidates, prompt=PROMPT, budget=BUDGET, batch_size=ROWS, seed=0, perplexity=False
    )
    both, first, second = run(texts), run(texts[:ROWS]), run(texts[ROWS:])
    halves = np.array([first.cosine["decode"]["tova"], second.cosine["decode"]["tova"]])
    assert_close(np.array(both.cosine["decode"]["tova"]), halves.mean(axis=0), 1e-5)
    assert np.abs(halves[0] - halves[1]).max() > 1e-4
    assert both.cosine["prefill"]["dense"] == [1.0] * N


def test_a_pattern_stands_in_the_phase_that_is_tried_only():
    prefill = alone(make_policy("snapkv"), make_policy("dense"), "prefill", BUDGET)
    decode = alone(make_policy("h2o"), make_policy("dense"), "decode", BUDGET)
    assert (prefill.name, decode.name) == ("snapkv+dense", "dense+h2o")
    assert compose(make_policy("snapkv"), make_policy("h2o")).name == "snapkv+h2o"
