"""How a budget is spent."""

import pytest

from kvpop_jax.cache import plan_cache
from kvpop_jax.errors import UserError


@pytest.mark.core
@pytest.mark.parametrize(("state_bytes", "entries"), [(0, 0), (1, 1), (64, 1), (65, 2), (640, 10)])
def test_every_entry_of_the_budget_is_accounted_for_and_state_rounds_up(state_bytes, entries):
    plan = plan_cache("p", 40, sinks=4, window=8, state_bytes=state_bytes, entry_bytes=64, scratch=3)
    assert plan.state_entries == entries
    assert plan.sinks + plan.window + plan.pool + plan.state_entries == plan.budget == 40
    # The state stands elsewhere, so its entries are not allocated; scratch is, on top.
    assert plan.slots == 40 - entries + 3


@pytest.mark.core
def test_the_smallest_budget_has_a_pool_of_one_and_is_named_when_missed():
    sizes = {"sinks": 4, "window": 8, "state_bytes": 65, "entry_bytes": 64}
    assert plan_cache("kvpop", 15, **sizes).pool == 1
    with pytest.raises(UserError, match=r"budget 14 .* kvpop: sinks 4 \+ window 8 .*state 2 take 14; .* at least 15"):
        plan_cache("kvpop", 14, **sizes)


@pytest.mark.core
def test_pinning_takes_from_the_pool_what_the_sinks_do_not_cover():
    plan = plan_cache("p", 40, sinks=4, window=8, state_bytes=0, entry_bytes=64)
    assert [plan.pool_beside(pinned) for pinned in (4, 5, 31)] == [28, 27, 1]
    plan.check_prompt(31)
    with pytest.raises(UserError, match=r"pin_prompt: a prompt of 32 tokens .* budget of 40; it may have 31"):
        plan.check_prompt(32)
