"""The TPU kernel of `received_log_mass`, interpreted: the inherited suite on a simulated TPU, one case as plain JAX."""

import pytest
from received_log_mass_suite import CASES, ReceivedLogMassSuite

pytestmark = pytest.mark.tpu


@pytest.fixture
def float64():
    """The kernel computes in float32; only the judge is in float64."""


@pytest.mark.usefixtures("tpu_interpreter")
class TestSimulated(ReceivedLogMassSuite):
    backend = "tpu"
    dtype = "float32"
    tolerance = 2e-6


def test_plain_interpretation_gives_the_same(plain_interpreter):
    TestSimulated().test_it_is_the_log_of_the_summed_probabilities(CASES["one_past_a_block_some_queries"], None)
