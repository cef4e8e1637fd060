"""KVpop with a stateless scorer (arXiv 2607.05061, section on KVpop_mlp): an MLP on a token's own key and value."""

from kvpop_jax.policies.kvpop import learned_policy
from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.settings import PolicySettings


def make(settings: PolicySettings) -> Policy:
    """Ranks by the MLP scorer of the settings; it has no state to charge."""
    return learned_policy("kvpop_mlp", "mlp", settings)
