"""One token's work of the recurrent scorer: absorb the new token, rank the one that leaves the window."""

from pallas_kernels.scorer_step.api import ScorerWeights, age_decay, scorer_step, unit_rms

__all__ = ["ScorerWeights", "age_decay", "scorer_step", "unit_rms"]
