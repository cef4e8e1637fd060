"""The reference of `received_log_mass` against a map of probabilities."""

from received_log_mass_suite import ReceivedLogMassSuite


class TestReference(ReceivedLogMassSuite):
    backend = "reference"
