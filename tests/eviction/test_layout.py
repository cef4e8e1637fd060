import numpy as np
import pytest
from eviction_oracles import documents_of, numpy_layout, problems
from hypothesis import given, settings
from oracles import segment_rows

from kvpop_jax.eviction import eligible_range, token_layout
from kvpop_jax.eviction.layout import segment_stop


@settings(max_examples=40)
@given(problem=problems())
def test_positions_pins_and_pools_belong_to_each_document(problem):
    layout = numpy_layout(problem)
    stop_BS = np.asarray(segment_stop(problem.segment_BS))
    for document in documents_of(problem):
        here = (document.row, slice(document.tokens.start, document.tokens.stop))
        np.testing.assert_array_equal(layout.position_BS[here], np.arange(len(document.tokens)))
        np.testing.assert_array_equal(layout.pinned_BS[here], [t in document.pinned for t in document.tokens])
        np.testing.assert_array_equal(layout.pool_BS[here], document.pool)
        np.testing.assert_array_equal(stop_BS[here], document.tokens.stop)


@settings(max_examples=40)
@given(problem=problems())
def test_the_eligible_range_holds_what_is_neither_pinned_nor_in_the_window(problem):
    start_BS, stop_BS = (np.asarray(bound) for bound in eligible_range(numpy_layout(problem), problem.window))
    for document in documents_of(problem):
        for q in document.tokens:
            bounds = range(start_BS[document.row, q], stop_BS[document.row, q])
            assert list(bounds) == document.eligible(q, problem.window)


@pytest.mark.core
def test_no_prompt_pins_the_sinks_alone_and_leaves_the_pool_whole():
    segment_BS = segment_rows([[5, 3]], 8)
    layout = token_layout(segment_BS, sinks=2, pool=4)
    assert np.asarray(layout.pinned_BS).astype(int).tolist() == [[1, 1, 0, 0, 0, 1, 1, 0]]
    assert np.asarray(layout.pool_BS).tolist() == [[4] * 8]
