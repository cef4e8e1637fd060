"""What a layer keeps for its backward pass when all else is computed again.

Whoever rematerialises saves the values that bear `SAVED`, as in `jax.checkpoint(f, policy=SAVE_RESIDUALS)`: outputs
and log-sum-exps of attention, what eviction decided, and a scorer's gradient. They are small beside what they cost.
"""

from jax import Array
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

SAVED = "saved"

SAVE_RESIDUALS = checkpoint_policies.save_only_these_names(SAVED)


def saved(x: Array) -> Array:
    """The same array, kept under rematerialisation."""
    return checkpoint_name(x, SAVED)
