"""AdamW with warm-up and its own clipping, once per group of weights (optax)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from kvpop_jax.config import OptimizerConfig, ScheduleConfig
from kvpop_jax.training.stacked import Stacked, map_parts


def schedule(settings: ScheduleConfig, steps: int) -> optax.Schedule:
    """Learning rate at each step of a run of `steps`."""
    # Step 0 already moves: the warm-up's first value is lr / warmup, not 0.
    warmup = min(settings.warmup, steps)
    ramp = optax.linear_schedule(settings.lr / max(warmup, 1), settings.lr, max(warmup - 1, 1))
    if settings.shape == "constant":
        after = optax.constant_schedule(settings.lr)
    else:
        after = optax.cosine_decay_schedule(settings.lr, max(steps - warmup, 1), alpha=settings.final)
    return optax.join_schedules([ramp, after], [warmup])


def make_optimizer(settings: OptimizerConfig, rate: ScheduleConfig, steps: int) -> optax.GradientTransformation:
    """Clip by the group's own global norm, then AdamW; only matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(
            schedule(rate, steps),
            b1=settings.betas[0],
            b2=settings.betas[1],
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            mask=_matrices,
        ),
    )


def _matrices(params: Any) -> Any:
    """What decays. The biases of all KV heads together have two axes, and are no matrix for that."""

    def of_part(part):
        stacked = isinstance(part, Stacked)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.ndim(leaf) >= 2 + stacked and "bias" not in jax.tree_util.keystr(path), part
        )

    return map_parts(of_part, params)
