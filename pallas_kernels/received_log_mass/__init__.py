"""The attention every key receives from later queries, as a log-mass, without a dense map."""

from pallas_kernels.received_log_mass.api import received_log_mass

__all__ = ["received_log_mass"]
