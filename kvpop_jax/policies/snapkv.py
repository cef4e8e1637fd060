"""SnapKV (Li et al. 2024, arXiv 2404.14469): keep what the end of the prompt looks at.

Score: attention of the last `observed` queries over all keys, averaged over them and over `kernel` neighbours; those
last tokens stay. The authors' code scores every query head of a copied K and V, and its LongBench runs use a maximum
over 7 neighbours; as in kvpress, here the mean over a group and the average count. It says nothing of the answer: see
`prefill_only`.
"""

from collections.abc import Callable

from jaxtyping import Array, Float

from kvpop_jax.policies.machinery.base import Policy, Prompt
from kvpop_jax.policies.machinery.prefill_only import prefill_only
from kvpop_jax.policies.machinery.prompt_attention import mean_over_queries, pooled, window_attention
from kvpop_jax.policies.machinery.settings import MethodSettings, PolicySettings


def make(settings: PolicySettings) -> Policy:
    """Keeps the last `observed` tokens of the prompt and the best of the rest."""
    return prefill_only("snapkv", settings, snapkv_score(settings.methods), window=settings.methods.observed)


def snapkv_score(methods: MethodSettings) -> Callable[[Prompt], Float[Array, "B K S"]]:
    """The score of every token of a prompt; 0 for the observed ones themselves."""

    def score(prompt: Prompt) -> Float[Array, "B K S"]:
        attention_BHS = window_attention(prompt, methods.observed, mean_over_queries)
        return pooled(attention_BHS, prompt, methods.observed, methods.kernel)

    return score
