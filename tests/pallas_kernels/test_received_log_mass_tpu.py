"""The TPU kernel of `received_log_mass`, interpreted: the inherited suite on a simulated TPU and as plain JAX."""

import pytest
from received_log_mass_suite import ReceivedLogMassSuite

pytestmark = pytest.mark.tpu


@pytest.fixture
def float64():
    """The kernel computes in float32; only the judge is in float64."""


class _Kernel(ReceivedLogMassSuite):
    backend = "tpu"
    dtype = "float32"
    tolerance = 2e-6


@pytest.mark.usefixtures("tpu_interpreter")
class TestSimulated(_Kernel):
    pass


@pytest.mark.usefixtures("plain_interpreter")
class TestPlainly(_Kernel):
    pass
