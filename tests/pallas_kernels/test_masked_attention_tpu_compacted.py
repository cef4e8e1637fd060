"""The TPU kernels of `masked_attention` over compacted chunks: the inherited suite on a simulated TPU."""

from functools import partial

import masked_attention_suite
import pytest
from masked_attention_suite import MaskedAttentionSuite

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
