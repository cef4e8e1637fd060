"""Budgets of layers from their sensitivities (PolyKV Algorithm 1, step 2 and 3)."""

from collections.abc import Sequence

from kvpop_jax.errors import UserError


def allocate(score_N: Sequence[float], total: int, least_N: Sequence[int], most: int) -> tuple[int, ...]:
    """Integers with sum `total`: every layer gets its least, and the rest goes by score.

        b_l = least_l + (total - sum least) (s_l + eps) / sum (s + eps),  eps = 1e-6 mean(s), or 1e-6 where all are 0

    Negative scores count as 0. What a layer would get beyond `most` goes to the others by the same rule; fractions go
    to the largest remainders, to lower layers first among equals.

    Args:
        score_N: sensitivity of every layer.
        total: entries per KV head to spread over the layers.
        least_N: the fewest entries that each layer can be given.
        most: the most that any layer can use.

    Raises:
        UserError: the layers cannot have their least, or cannot hold the total.
    """
    layers = range(len(score_N))
    if total < sum(least_N):
        raise UserError(f"a total of {total} entries is less than the layers need at least, {sum(least_N)}")
    if total > most * len(score_N):
        raise UserError(f"a total of {total} entries is more than {len(score_N)} layers of {most} can hold")
    positive = [max(float(score), 0.0) for score in score_N]
    epsilon = 1e-6 * sum(positive) / len(positive) or 1e-6
    weight = [score + epsilon for score in positive]
    share: dict[int, float] = {}
    full: set[int] = set()
    while True:
        open_layers = [layer for layer in layers if layer not in full]
        rest = total - most * len(full) - sum(least_N[layer] for layer in open_layers)
        scale = sum(weight[layer] for layer in open_layers)
        share = {layer: least_N[layer] + rest * weight[layer] / scale for layer in open_layers}
        over = {layer for layer in open_layers if share[layer] > most}
        if not over:
            break
        full |= over
    budget = {layer: int(share[layer]) for layer in share} | dict.fromkeys(full, most)
    missing = total - sum(budget.values())
    by_remainder = sorted(share, key=lambda layer: (-(share[layer] - int(share[layer])), layer))
    # A share that rounds up stays within `most`: an integer cannot lie between the two.
    for layer in by_remainder[:missing]:
        budget[layer] += 1
    return tuple(budget[layer] for layer in layers)
