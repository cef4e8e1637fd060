"""Budgets of layers: exact totals, floors, ceilings, and what sensitivity buys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpop_jax.errors import UserError
from kvpop_jax.polykv import allocate

pytestmark = pytest.mark.core


@st.composite
def problems(draw):
    layers = draw(st.integers(1, 12))
    least = draw(st.lists(st.integers(1, 40), min_size=layers, max_size=layers))
    most = draw(st.integers(max(least), 120))
    total = draw(st.integers(sum(least), most * layers))
    score = draw(st.lists(st.floats(-1, 5) | st.just(0.0), min_size=layers, max_size=layers))
    return score, total, least, most


@given(problems())
def test_every_total_is_exact_and_every_layer_within_its_bounds(problem):
    score, total, least, most = problem
    budgets = allocate(score, total, least, most)
    assert sum(budgets) == total
    assert all(low <= budget <= most for low, budget in zip(least, budgets, strict=True))


@given(problems())
def test_a_more_sensitive_layer_gets_no_less_beyond_its_floor(problem):
    score, total, least, most = problem
    budgets = allocate(score, total, least, most)
    for a in range(len(score)):
        for b in range(len(score)):
            if max(score[a], 0) > max(score[b], 0) and budgets[a] < most:
                # One entry may be lost to rounding.
                assert budgets[a] - least[a] >= budgets[b] - least[b] - 1


def test_shares_are_proportional_and_fractions_go_to_the_largest_remainders():
    # 10 to spread over 1 : 2 : 4 is 1.43, 2.86, 5.71: two entries are left for the remainders .86 and .71.
    assert allocate([1, 2, 4], 13, [1, 1, 1], 100) == (2, 4, 7)


def test_equal_remainders_go_to_lower_layers():
    assert allocate([1, 1, 1], 8, [1, 1, 1], 100) == (3, 3, 2)


def test_what_a_full_layer_cannot_use_goes_to_the_others():
    assert allocate([100, 1, 1], 60, [10, 10, 10], 30) == (30, 15, 15)


def test_without_any_sensitivity_budgets_are_uniform():
    assert allocate([0, -2, 0], 30, [1, 1, 1], 100) == (10, 10, 10)


@pytest.mark.parametrize(("total", "words"), [(5, "less than the layers need"), (500, "more than 3 layers")])
def test_an_impossible_total_is_refused(total, words):
    with pytest.raises(UserError, match=words):
        allocate([1, 1, 1], total, [2, 2, 2], 100)
