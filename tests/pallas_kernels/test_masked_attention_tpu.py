"""The TPU kernels of `masked_attention`, interpreted: the inherited suite on both forms, and what is theirs alone."""

import pytest
from masked_attention_suite import MaskedAttentionSuite

from pallas_kernels.masked_attention import tpu

pytestmark = pytest.mark.tpu


@pytest.fixture
def float64():
    """The kernels compute in float32; only the judge is in float64."""


@pytest.mark.usefixtures("plain_interpreter")
class TestPlain(MaskedAttentionSuite):
    backend = "tpu"
    dtype = "float32"
    tolerance = 2e-6
