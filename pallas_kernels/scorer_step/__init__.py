"""One token's work of the recurrent scorer: absorb the new token, score the one that leaves the window."""

from pallas_kernels.scorer_step.api import ScorerWeights, scorer_step, unit_rms

__all__ = ["ScorerWeights", "scorer_step", "unit_rms"]
