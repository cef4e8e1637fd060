"""KVpop with a stateless scorer (arXiv 2607.05061, section on KVpop_mlp): an MLP on a token's own key and value."""

from kvpop_jax.policies.base import Policy, PolicySettings
from kvpop_jax.policies.kvpop import learned_policy


def make(settings: PolicySettings) -> Policy:
    """Ranks by the MLP scorer of the settings; it has no state to charge."""
    return learned_policy("kvpop_mlp", "mlp", settings)
