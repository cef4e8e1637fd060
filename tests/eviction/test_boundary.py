"""The boundary loss against a loop that compares the newest token with the incumbent, query by query (KVpop 1.5)."""

from dataclasses import dataclass
from functools import cache

import jax
import numpy as np
import pytest
from eviction_oracles import HEADS, LENGTH, Problem, best, documents_of, layout_of, priorities, problems
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_close, segment_rows

from kvpop_jax.eviction import BoundaryMetrics, BoundarySettings, boundary_loss

LIMIT = (0.7, 1.6)


@dataclass(frozen=True)
class Gradients:
    score_BKS: np.ndarray
    decay_K: np.ndarray
    target_BKS: np.ndarray


def run(score_BKS, decay_K, target_BKS, problem: Problem, **fields):
    """(loss, metrics, gradients) with every number traced."""
    fields = {"temperature": 1.0, "balance_limit": LIMIT, "balance": True, "margin_weight": False} | fields
    layout = layout_of(**problem.layout_arguments)
    compiled = _compiled(fields["balance"], fields["margin_weight"])
    numbers = (fields["temperature"], fields["balance_limit"])
    (loss, metrics), gradients = compiled(score_BKS, decay_K, target_BKS, layout, problem.window, *numbers)
    return float(loss), jax.tree.map(float, metrics), Gradients(*map(np.asarray, gradients))


@cache
def _compiled(balance: bool, margin_weight: bool):
    def loss(score_BKS, decay_K, target_BKS, layout, window, temperature, balance_limit):
        boundary = BoundarySettings(temperature, balance, balance_limit, margin_weight)
        return boundary_loss(score_BKS, decay_K, target_BKS, layout, window=window, settings=boundary)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


@dataclass(frozen=True)
class Comparison:
    """One query of one head: the newest eligible token against the weakest of the target's pool of the query before."""

    row: int
    head: int
    new: int
    incumbent: int
    sign: int
    margin: float
    target_gap: float


def comparisons(score_BKS, decay_K, target_BKS, problem: Problem) -> list[Comparison]:
    """In the order of rows, documents, heads and queries."""
    result = []
    for document in documents_of(problem):
        for head in range(HEADS):
            for q in document.tokens:
                lost_S, new = decay_K[head] * (q - np.arange(LENGTH)), q - problem.window
                score_S, target_S = (x[document.row, head] - lost_S for x in (score_BKS, target_BKS))
                before = document.eligible(q - 1, problem.window)
                if new not in document.eligible(q, problem.window) or not len(before) >= document.pool > 0:
                    continue
                incumbent = best(target_S, before, document.pool)[-1]
                kept = new in best(target_S, [*before, new], document.pool)
                margin, gap = score_S[new] - score_S[incumbent], target_S[new] - target_S[incumbent]
                result.append(Comparison(document.row, head, new, incumbent, 1 if kept else -1, margin, gap))
    return result


def literal_loss(score_BKS, decay_K, target_BKS, problem: Problem, *, temperature, balance, margin_weight):
    """(loss, metrics, gradients), the last by hand; nothing but the student's margin has one."""
    found = comparisons(score_BKS, decay_K, target_BKS, problem)
    gradients = Gradients(np.zeros_like(score_BKS), np.zeros_like(decay_K), np.zeros_like(target_BKS))
    loss = 0.0
    for c in found:
        weight = 1.0
        if balance:
            of_head = [other.sign for other in found if other.head == c.head]
            weight *= np.clip(len(of_head) / (2 * of_head.count(c.sign)), *LIMIT)
        if margin_weight:
            weight *= 1 - np.exp(-abs(c.target_gap))
        signed = -c.sign * c.margin / temperature
        loss += weight * np.log1p(np.exp(signed)) / len(found)
        slope = -weight * c.sign / temperature / (1 + np.exp(-signed)) / len(found)
        gradients.score_BKS[c.row, c.head, c.new] += slope
        gradients.score_BKS[c.row, c.head, c.incumbent] -= slope
        gradients.decay_K[c.head] += slope * (c.new - c.incumbent)
    count = max(len(found), 1)
    keep_rate = sum(c.sign == 1 for c in found) / count
    accuracy = sum((c.margin > 0) == (c.sign == 1) for c in found) / count
    return loss, BoundaryMetrics(keep_rate, accuracy, len(found)), gradients


@st.composite
def scores_and_targets(draw) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Score, decay and target, with ties; multiples of a power of two, so that both sides see the same ties."""
    score_BKS, target_BKS = (draw(priorities()).astype(np.float64) for _ in range(2))
    scale = 2.0 ** -np.ceil(np.log2(max(np.abs(target_BKS).max(), np.abs(score_BKS).max(), 1)))
    decay_K = np.array([draw(st.sampled_from([0.0, 2**-6, 0.25])) for _ in range(HEADS)])
    return 4 * scale * score_BKS, decay_K, 4 * scale * target_BKS


@pytest.mark.core
@pytest.mark.parametrize(("balance", "margin_weight"), [(True, False), (False, True)], ids=["balance", "margin_weight"])
@settings(max_examples=40)
@given(problem=problems(), inputs=scores_and_targets(), temperature=st.sampled_from([0.5, 1.0, 3.0]))
def test_loss_metrics_and_gradients_are_those_of_the_loop(balance, margin_weight, problem, inputs, temperature):
    weights = {"temperature": temperature, "balance": balance, "margin_weight": margin_weight}
    wanted_loss, wanted_metrics, wanted_gradients = literal_loss(*inputs, problem, **weights)
    with jax.enable_x64(True):
        loss, metrics, gradients = run(*inputs, problem, **weights)
    assert loss == pytest.approx(wanted_loss, abs=1e-12)
    assert vars(metrics) == pytest.approx(vars(wanted_metrics), abs=1e-12)
    for name, wanted in vars(wanted_gradients).items():
        assert_close(getattr(gradients, name), wanted, 1e-12)


@pytest.mark.core
@pytest.mark.parametrize("keep", [True, False])
def test_the_newest_token_is_pushed_up_if_the_target_keeps_it_and_down_if_not(keep, float64):
    problem, new, incumbent = _one_comparison()
    target_BKS = np.full((2, HEADS, LENGTH), 5.0)
    target_BKS[..., incumbent], target_BKS[..., new] = 0, 1 if keep else -1
    _, metrics, gradients = run(np.zeros_like(target_BKS), np.zeros(HEADS), target_BKS, problem)
    assert metrics.comparisons == 2 * HEADS and metrics.keep_rate == keep
    sign = 1 if keep else -1
    assert np.all(sign * gradients.score_BKS[..., new] < 0) and np.all(sign * gradients.score_BKS[..., incumbent] > 0)
    others = np.delete(gradients.score_BKS, [new, incumbent], axis=-1)
    assert not np.any(others)
    # new is the younger: a keep asks for a larger lambda, which favours the young.
    assert np.all(sign * gradients.decay_K < 0)


@pytest.mark.core
def test_nothing_is_compared_before_the_pool_is_full(float64):
    problem, _, _ = _one_comparison()
    larger = Problem(problem.segment_BS, problem.prompt_BS, problem.sinks, problem.window, problem.pool_B + 1)
    rng = np.random.default_rng(0)
    score_BKS, target_BKS = rng.normal(size=(2, 2, HEADS, LENGTH))
    loss, metrics, gradients = run(score_BKS, np.full(HEADS, 0.1), target_BKS, larger)
    assert loss == 0 and vars(metrics) == {"keep_rate": 0, "accuracy": 0, "comparisons": 0}
    assert not any(np.any(gradient) for gradient in vars(gradients).values())


@pytest.mark.core
def test_lambda_cannot_lower_the_loss_by_turning_every_label_into_a_keep(float64):
    """The labels are those of the lambda of the moment, but its gradient is that of the student's margin alone: with a
    target that prefers old tokens lambda falls, however large it is already."""
    problem, new, incumbent = _one_comparison()
    target_BKS = np.broadcast_to(-np.arange(LENGTH, dtype=np.float64), (2, HEADS, LENGTH))
    for decay, kept in ((0.0, False), (0.5, False), (2.0, True)):
        arguments = (target_BKS, np.full(HEADS, decay), target_BKS, problem)
        for margin_weight in (False, True):
            _, metrics, gradients = run(*arguments, balance=not margin_weight, margin_weight=margin_weight)
            assert metrics.keep_rate == kept
            assert not np.any(gradients.target_BKS)
            direction = gradients.score_BKS[..., new].sum(0)
            if decay == 2.0:
                # Every token outranks its elders: the incumbent of the pool's first fill is the first eligible token.
                incumbent = problem.sinks
            np.testing.assert_allclose(gradients.decay_K, direction * (new - incumbent), rtol=1e-12)


def _one_comparison() -> tuple[Problem, int, int]:
    """Whole rows in which only the last query compares, its newest eligible token, and the one before that."""
    sinks, window = 2, 4
    pool = LENGTH - sinks - window - 1
    segment_BS = segment_rows([[LENGTH], [LENGTH]], LENGTH)
    problem = Problem(segment_BS, np.zeros((2, LENGTH), bool), sinks, window, np.full(2, pool, np.int32))
    return problem, LENGTH - 1 - window, LENGTH - 2 - window
