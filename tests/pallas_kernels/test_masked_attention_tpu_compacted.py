"""The TPU kernels of `masked_attention` over compacted chunks: the inherited suite on a simulated TPU."""

from functools import partial

import masked_attention_suite
import pytest
from masked_attention_suite import CASES, MaskedAttentionSuite, assert_run_matches_the_dense_form, random_inputs

from pallas_kernels.masked_attention import masked_attention, tpu

pytestmark = pytest.mark.tpu


@pytest.fixture
def float64():
    """The kernels compute in float32; only the judge is in float64."""


@pytest.fixture(scope="class")
def compacted():
    """Chunks of one block, so that even the short rows of the suite have survivors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu, "chosen_chunk", lambda *_: 128)
        patch.setattr(masked_attention_suite, "masked_attention", partial(masked_attention, capacity=200))
        masked_attention_suite._compiled.cache_clear()
        yield
        masked_attention_suite._compiled.cache_clear()


@pytest.mark.usefixtures("tpu_interpreter", "compacted")
class TestCompactedForm(MaskedAttentionSuite):
    backend = "tpu"
    dtype = "float32"
    tolerance = 2e-6

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_output_and_gradients_match_the_dense_form(self, case, float64):
        """With both cotangents in one run; the plain form of the same kernels takes them apart."""
        assert_run_matches_the_dense_form("tpu", random_inputs(case, self.dtype), self.tolerance)
