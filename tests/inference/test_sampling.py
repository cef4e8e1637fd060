"""Drawing tokens: which ones may come, how often, and with what log-probability."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpop_jax.errors import UserError
from kvpop_jax.inference import SamplingParams, sample

DRAWS = 4000
LOGIT_V = np.random.default_rng(0).normal(size=12).astype(np.float32) * 1.5
draw = jax.jit(sample, static_argnums=3)


def softmax(x_V):
    return np.exp(x_V - x_V.max()) / np.exp(x_V - x_V.max()).sum()


def kept_by_hand(params: SamplingParams) -> list[int]:
    """The likeliest `top_k`, then of those, renormalised, the fewest that together reach `top_p`."""
    order = np.argsort(-LOGIT_V)[: params.top_k or None]
    probabilities = softmax(LOGIT_V[order] / params.temperature)
    count = next(n for n in range(1, len(order) + 1) if n == len(order) or probabilities[:n].sum() >= params.top_p)
    return sorted(order[:count].tolist())


@pytest.mark.core
@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_p": 0.01}, {"top_k": 6, "top_p": 0.8}],
    ids=str,
)
def test_tokens_come_from_the_kept_set_as_often_as_they_should(options):
    params = SamplingParams(temperature=0.8, **options)
    logits_BV = np.broadcast_to(LOGIT_V, (DRAWS, len(LOGIT_V)))
    token_B, log_prob_B = draw(logits_BV, np.arange(DRAWS, dtype=np.int32), np.full(DRAWS, 3, np.int32), params)
    kept = kept_by_hand(params)
    wanted = np.zeros(len(LOGIT_V))
    wanted[kept] = softmax(LOGIT_V[kept] / params.temperature)
    share = np.bincount(np.asarray(token_B), minlength=len(LOGIT_V)) / DRAWS
    assert set(np.flatnonzero(share)) <= set(kept)
    assert np.all(np.abs(share - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / DRAWS) + 1e-9)
    # Of the model, not of the tempered and truncated distribution that was drawn from.
    np.testing.assert_allclose(log_prob_B, np.log(softmax(LOGIT_V))[token_B], rtol=1e-5)


@pytest.mark.core
def test_temperature_0_takes_the_likeliest_whatever_the_seed():
    logits_BV = np.random.default_rng(1).normal(size=(9, 12)).astype(np.float32)
    token_B, log_prob_B = draw(logits_BV, np.arange(9, dtype=np.int32), np.arange(9, dtype=np.int32), SamplingParams())
    np.testing.assert_array_equal(token_B, logits_BV.argmax(-1))
    np.testing.assert_allclose(log_prob_B, [np.log(softmax(x_V)).max() for x_V in logits_BV], rtol=1e-5)


def test_a_draw_depends_on_the_seed_and_the_position_and_nothing_else():
    params, same = SamplingParams(temperature=1.0), partial(np.full, dtype=np.int32)
    logits_BV = jnp.zeros((64, 1000))
    index_B = np.arange(64, dtype=np.int32)
    by_seed, by_position, neither = (
        np.asarray(draw(logits_BV, seed_B, position_B, params)[0])
        for seed_B, position_B in ((index_B, same(64, 5)), (same(64, 5), index_B), (same(64, 5), same(64, 5)))
    )
    assert len(set(by_seed)) > 50 and len(set(by_position)) > 50
    assert set(neither) == {by_seed[5]} == {by_position[5]}


@pytest.mark.core
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("max_new_tokens", 0),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name_and_value(field, value):
    with pytest.raises(UserError, match=rf"{field}.* {value}"):
        SamplingParams(**{field: value})
