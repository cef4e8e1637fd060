"""The reference of `mlstm_chunkwise`: the common suite, then float64 and bounded memory."""

import chex
import jax
import jax.numpy as jnp
import pytest
from mlstm_chunkwise_suite import (
    LAYOUTS,
    MLSTMChunkwiseSuite,
    Sizes,
    in_float64,
    largest_error,
    parallel_form,
    random_inputs,
    random_layout,
    recurrent_form,
    run_numbers,
    segment_ids,
    truth,
    with_gradients,
)

from pallas_kernels.mlstm_chunkwise import mlstm_chunkwise


class TestReference(MLSTMChunkwiseSuite):
    backend = "reference"

    @pytest.mark.core
    @pytest.mark.parametrize("name", LAYOUTS)
    @pytest.mark.parametrize("chunk", [1, 16, 64])
    def test_float64_equals_the_recurrent_form(self, name, chunk):
        actual = in_float64(self.form(chunk), random_inputs(seed=1), segment_ids(LAYOUTS[name]))
        chex.assert_trees_all_close(actual, truth(name), rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("name", ["one_segment", "segments_inside_a_chunk"])
    def test_a_chunk_of_128_is_as_precise_as_one_of_16(self, name):
        """Though the sums that run through it are eight times as large."""
        sizes = Sizes(scale=4)
        actual = with_gradients(self.form(128), random_inputs(1, sizes), segment_ids(LAYOUTS[name], sizes))
        assert largest_error(actual, truth(name, sizes)) < self.float32_bound

    @pytest.mark.parametrize("name", LAYOUTS)
    def test_the_recurrent_form_equals_the_parallel_form(self, name):
        actual = in_float64(parallel_form, random_inputs(seed=1), run_numbers(segment_ids(LAYOUTS[name])))
        chex.assert_trees_all_close(actual, truth(name), rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("seed", range(20))
    def test_float64_equals_both_forms_on_random_layouts(self, seed):
        inputs, segment_BS = random_inputs(seed), segment_ids(random_layout(seed))
        actual = in_float64(self.form(), inputs, segment_BS)
        for form in (recurrent_form, parallel_form):
            expected = in_float64(form, inputs, run_numbers(segment_BS))
            chex.assert_trees_all_close(actual, expected, rtol=1e-9, atol=1e-10)

    def test_memory_grows_in_proportion_to_the_length(self):
        def loss(inputs, segment_BS):
            return jnp.sum(mlstm_chunkwise(*inputs, None, segment_BS, chunk=64)[0])

        sizes = []
        for S in (1024, 8192):
            shapes = ((1, S, 1, 4),) * 3 + ((1, S, 1),) * 2
            inputs = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
            compiled = jax.jit(jax.grad(loss)).lower(inputs, jax.ShapeDtypeStruct((1, S), jnp.int32)).compile()
            sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        assert sizes[1] < 8.5 * sizes[0]
