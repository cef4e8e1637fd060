"""KVpop (Hauzenberger et al. 2026, arXiv 2607.05061): a learned forecast of the attention a token will receive.

The scorer's mLSTM memory absorbs every token and is read once per token, when the token leaves the window, so a score
has seen `w` tokens of its future. The priority is score + lambda * position (section 1.4).
"""

from kvpop_jax.errors import UserError
from kvpop_jax.policies.machinery.base import Policy
from kvpop_jax.policies.machinery.expiry_form import expiry_policy
from kvpop_jax.policies.machinery.settings import PolicySettings


def make(settings: PolicySettings) -> Policy:
    """Ranks by the scorer of the settings; its state is charged to the budget."""
    return learned_policy("kvpop", "mlstm", settings)


def learned_policy(name: str, kind: str, settings: PolicySettings) -> Policy:
    """The policy of a scorer of that kind.

    Raises:
        UserError: there is no scorer, or one of another kind.
    """
    scorer = settings.scorer
    if scorer is None:
        raise UserError(f"policy {name} needs a trained scorer: name its folder with --scorer")
    if scorer.kind != kind:
        raise UserError(f"policy {name} needs a scorer of kind {kind!r}, not {scorer.kind!r}")

    def parallel(params, prompt):
        layout = prompt.layout
        B = prompt.k_BSKD.shape[0]
        score_BKS, state = scorer.parallel(
            params,
            scorer.init_state(B, settings.window),
            prompt.hidden_BSE,
            prompt.k_BSKD,
            prompt.v_BSKD,
            layout.segment_BS,
            delay=settings.window,
        )
        return score_BKS + scorer.decay(params)[:, None] * layout.position_BS[:, None], state

    def recurrent(params, state, new, leaving, plan):
        return scorer.step(params, state, new.hidden_BE, new.k_BKD, new.v_BKD, leaving)

    return expiry_policy(
        name,
        settings,
        parallel,
        recurrent,
        signals=frozenset({"hidden"}),
        state_bytes=lambda config: scorer.state_bytes_per_head(settings.window),
    )
