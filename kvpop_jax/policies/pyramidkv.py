"""PyramidKV (Cai et al. 2024, arXiv 2406.02069): SnapKV with large budgets in low layers and small ones in high layers.

Beside the `observed` tokens, layers hold from 2 - 1 / beta times the mean down to 1 / beta of it, in equal steps. The
authors' code rounds the step down and so keeps more than it says (7 % at 128 entries and 36 layers); here budgets are
rounded by largest remainder and sum exactly. It also clips the first layers at the length of the prompt: here budgets
do not depend on the prompt.
"""

import math

from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.prefill_only import prefill_only
from kvpop_jax.policies.machinery.settings import PolicySettings
from kvpop_jax.policies.snapkv import snapkv_score


def make(settings: PolicySettings) -> Policy:
    """SnapKV's scores; the budgets of layers fall linearly."""
    methods = settings.methods

    def layer_budgets(budget: int, num_layers: int) -> tuple[int, ...]:
        mean = budget - methods.observed
        last = mean / methods.pyramid_beta
        fall = (2 * mean - 2 * last) / max(num_layers - 1, 1)
        wanted = [2 * mean - last - layer * fall for layer in range(num_layers)] if num_layers > 1 else [float(mean)]
        return tuple(methods.observed + share for share in round_to_sum(wanted, num_layers * mean))

    return prefill_only(
        "pyramidkv", settings, snapkv_score(methods), window=methods.observed, layer_budgets=layer_budgets
    )


def round_to_sum(wanted: list[float], total: int) -> list[int]:
    """Integers nearest to `wanted` that sum to `total`: rounded down, then the largest remainders up; of equal ones the
    lower layer. `wanted` sums to `total` up to rounding."""
    rounded = [math.floor(share + 1e-9) for share in wanted]
    by_remainder = sorted(range(len(wanted)), key=lambda layer: (round(rounded[layer] - wanted[layer], 9), layer))
    for layer in by_remainder[: total - sum(rounded)]:
        rounded[layer] += 1
    return rounded
