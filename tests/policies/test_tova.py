"""TOVA against a cache that is a list: attend to all of it, then drop what the last query attended to least."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inference.tiny_model import CONFIG, ENTRY_BYTES, FREQUENCY_D2, make_policy
from oracles import assert_close

from kvpop_jax.cache import LayerCache, live_entries
from kvpop_jax.eviction import token_layout
from kvpop_jax.policies import NewToken, Prompt, read_prompt

BUDGET, PROMPT, STEPS = 12, 32, 24
HEADS, KV_HEADS, DIM = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
# One token, below the budget, just filling it, far above it; then three whose prompt is pinned.
LENGTH_B = np.array([1, 7, 12, 32, 1, 6, 11], np.int32)
PINNED_B = np.where(np.arange(7) < 4, 0, LENGTH_B)
POLICY = make_policy("tova")
PLAN = POLICY.plan(BUDGET, CONFIG, ENTRY_BYTES)


class ListCache:
    """One row's cache, in order of position; all heads share what is dropped."""

    def __init__(self, pinned: int):
        self.pinned = pinned
        self.entries: list[tuple[int, np.ndarray, np.ndarray]] = []

    def add(self, position, k_KD, v_KD):
        self.entries.append((position, k_KD, v_KD))

    def attend(self, q_HD):
        """Output of every query head, and the mean over all of them of the attention to every entry."""
        o_HD, weight_HC = [], []
        for head, q_D in enumerate(q_HD):
            shared = head // (HEADS // KV_HEADS)
            score_C = np.array([q_D @ k_KD[shared] for _, k_KD, _ in self.entries]) / np.sqrt(DIM)
            weight_C = np.exp(score_C - score_C.max())
            weight_HC.append(weight_C / weight_C.sum())
            o_HD.append(weight_HC[-1] @ np.array([v_KD[shared] for *_, v_KD in self.entries]))
        return np.array(o_HD), np.mean(weight_HC, axis=0)

    def evict(self, weight_C):
        """Leaves the pinned entries and the heaviest of the rest; of equal ones the older."""
        order = sorted(range(len(weight_C)), key=lambda c: (self.entries[c][0] >= self.pinned, -weight_C[c], c))
        self.entries = [self.entries[c] for c in sorted(order[:BUDGET])]

    @property
    def positions(self) -> list[int]:
        return [position for position, *_ in self.entries]


def simulate(q_THD, k_TKD, v_TKD, length, pinned):
    """Outputs of all tokens, and the positions kept after the prompt and after every step."""
    cache, o_THD, kept = ListCache(pinned), [], []
    for t in range(length + STEPS):
        cache.add(t, k_TKD[t], v_TKD[t])
        o_HD, weight_C = cache.attend(q_THD[t])
        o_THD.append(o_HD)
        if t >= length - 1:
            cache.evict(weight_C)
            kept.append(cache.positions)
    return np.array(o_THD), kept


@jax.jit
def run_prompt(q_BSHD, k_BSKD, v_BSKD):
    index_S = jnp.arange(PROMPT)
    layout = token_layout(
        (index_S < LENGTH_B[:, None]).astype(jnp.int32),
        sinks=PLAN.sinks,
        pool=PLAN.pool,
        prompt_BS=index_S < PINNED_B[:, None],
    )
    nothing_BS = jnp.zeros(q_BSHD.shape[:2], jnp.int32)
    prompt = Prompt(
        nothing_BS, nothing_BS[..., None], q_BSHD, k_BSKD, v_BSKD, layout, nothing_BS[:, 0], 0, FREQUENCY_D2
    )
    return read_prompt(POLICY, None, lambda _: prompt, PLAN)


@jax.jit
def run_step(cache, position_B, q_BHD, k_BKD, v_BKD):
    nothing_B = jnp.zeros_like(position_B)
    pinned_B = jnp.asarray(PINNED_B)
    new = NewToken(nothing_B, position_B, pinned_B, nothing_B, nothing_B[:, None], q_BHD, k_BKD, v_BKD, 0, FREQUENCY_D2)
    return POLICY.step(None, cache, new, PLAN)


def kept_positions(cache: LayerCache, row: int) -> list[list[int]]:
    """Of every KV head, in order."""
    return [sorted(p for p in slots if p >= 0) for slots in np.asarray(cache.position_BKC)[row].tolist()]


@pytest.mark.core
def test_tova_keeps_and_attends_to_what_a_list_would():
    rng = np.random.default_rng(0)
    rows, total = len(LENGTH_B), PROMPT + STEPS
    q_BTHD, k_BTKD, v_BTKD = (
        scale * rng.normal(size=(rows, total, heads, DIM)).astype(np.float32)
        for scale, heads in ((1.5, HEADS), (1, KV_HEADS), (1, KV_HEADS))
    )
    wanted = [simulate(*x, *lengths) for *x, lengths in zip(
        q_BTHD, k_BTKD, v_BTKD, zip(LENGTH_B, PINNED_B, strict=True), strict=True
    )]  # fmt: skip

    o_BSHD, cache = run_prompt(q_BTHD[:, :PROMPT], k_BTKD[:, :PROMPT], v_BTKD[:, :PROMPT])
    for row, (o_THD, kept) in enumerate(wanted):
        assert_close(o_BSHD[row, : LENGTH_B[row]], o_THD[: LENGTH_B[row]], 1e-5)
        assert kept_positions(cache, row) == [kept[0]] * KV_HEADS
    row_B = np.arange(rows)
    for step in range(STEPS):
        position_B = LENGTH_B + step
        o_BHD, cache = run_step(cache, position_B, *(x[row_B, position_B] for x in (q_BTHD, k_BTKD, v_BTKD)))
        assert np.max(live_entries(cache)) <= BUDGET
        for row, (o_THD, kept) in enumerate(wanted):
            assert_close(o_BHD[row], o_THD[position_B[row]], 1e-5)
            assert kept_positions(cache, row) == [kept[step + 1]] * KV_HEADS
