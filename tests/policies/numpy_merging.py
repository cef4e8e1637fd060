"""Literal forms of policies by which entries that leave are merged into those that stay: D2O and CaM."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
from policies.numpy_rows import METHODS, SINKS, Entry, Held, Row, attend, cut, protection, scored, split
from policies.numpy_scores import add_received, drop_oldest, received

# --- D2O


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def nearest(k: np.ndarray, kept: list[tuple[np.ndarray, Entry]]) -> tuple[float, Entry]:
    """The kept entry whose key (given beside it) is most similar; of equal ones the oldest."""
    best = max(kept, key=lambda x: (round(cosine(k, x[0]), 9), -x[1].position))
    return cosine(k, best[0]), best[1]


def d2o_merge(row: Row, before: Held, held: Held) -> tuple[Held, float | None]:
    """What left `held` since `before` joins it; tau of all that the prompt has lost."""
    own = [[(row.k_TKD[e.position, head], e) for e in entries] for head, entries in enumerate(held)]
    lost = [
        [t for t in range(row.length) if t not in {e.position for e in entries}] for entries in held
    ]  # fmt: skip
    if not any(lost):
        return held, None
    similar = [[nearest(row.k_TKD[t, head], own[head]) for t in lost[head]] for head in range(row.heads)]
    means = [
        np.mean([similar[head][j][0] for head in range(row.heads) if j < len(similar[head])])
        for j in range(max(map(len, lost)))
    ]
    tau = float(np.mean(means))
    merged = []
    for head, entries in enumerate(held):
        there = {e.position: e for e in before[head]}
        sums = {e.position: [e.k.copy(), e.v.copy(), 1] for e in entries}
        for j, t in enumerate(lost[head]):
            if t in there and means[j] >= tau - 1e-9:
                c, target = similar[head][j]
                sums[target.position][0] += c * there[t].k
                sums[target.position][1] += c * there[t].v
                sums[target.position][2] += 1
        merged.append([replace(e, k=k / n, v=v / n) for e, (k, v, n) in zip(entries, sums.values(), strict=True)])
    return merged, tau


def d2o_prompt(row: Row, budget: int):
    before = scored(row.prompt_entries(), received(row))
    held = cut(before, budget - 1, protection(row, row.length - 1, budget // 2, SINKS))
    return row.dense_output, d2o_merge(row, before, held)[0]


def d2o_steps(row: Row, held: Held, budget: int):
    before = scored(held, received(row))
    held = cut(before, budget - 1, protection(row, row.length - 1, budget // 2, SINKS))
    held, tau = d2o_merge(row, before, held)
    yield None, held
    for t in range(row.length, len(row.q_THD)):
        held = [[*entries, row.entry(t, head)] for head, entries in enumerate(held)]
        o_HD, weights = attend(row, t, held)
        held = add_received(1.0)(row, held, weights)
        parts = [split(entries, budget - 1, protection(row, t, budget // 2, SINKS)) for entries in held]
        held = [kept for kept, _ in parts]
        if any(dropped for _, dropped in parts):
            found = [(gone, *nearest(gone.k, [(e.k, e) for e in kept])) for kept, dropped in parts for gone in dropped]
            mean = float(np.mean([c for _, c, _ in found]))
            tau = mean if tau is None else (tau + mean) / 2
            if mean >= tau - 1e-9:
                for gone, c, target in found:
                    target.k, target.v = (target.k + c * gone.k) / 2, (target.v + c * gone.v) / 2
        yield o_HD, held


# --- CaM


@jax.jit
def _draws(seed):
    key = jax.random.fold_in(jax.random.key(seed), 0)  # of layer 0
    keys_T = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(64))
    keys_TK = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(keys_T, np.arange(2))
    return jax.vmap(jax.vmap(jax.random.uniform))(keys_TK)


@cache
def draws(seed: int) -> np.ndarray:
    """[position, head]."""
    return np.asarray(_draws(seed))


def cam_leave(row: Row, head: int, entries: list[Entry], leaving: list[Entry], m: int, draw_TK) -> list[Entry]:
    """Those that stay, after those that leave have joined what follows them, the oldest first."""
    for gone in leaving:
        following = [e for e in entries if e.position > gone.position][:m]
        mean = np.mean([e.score for e in following]) if following else 0.0
        if draw_TK[gone.position, head] < np.clip(gone.score / max(mean, 1e-30), 0, 1):
            for e in following:
                e.v = e.v + gone.v / m
    left = {e.position for e in leaving}
    return [e for e in entries if e.position not in left]


def cam_cut(row: Row, held: Held, budget: int, draw_TK) -> Held:
    held = scored(held, received(row))
    m = min(METHODS.merged, budget - SINKS - 1)
    return [
        cam_leave(row, head, entries, drop_oldest(row, entries, budget)[1], m, draw_TK)
        for head, entries in enumerate(held)
    ]


def cam_prompt(row: Row, budget: int):
    return row.dense_output, cam_cut(row, row.prompt_entries(), budget, draws(row.seed))


def cam_steps(row: Row, held: Held, budget: int):
    draw_TK, m = draws(row.seed), min(METHODS.merged, budget - SINKS - 1)
    held = cam_cut(row, held, budget, draw_TK)
    yield None, held
    for t in range(row.length, len(row.q_THD)):
        held = [
            [
                *cam_leave(row, head, entries, drop_oldest(row, entries, budget - 1)[1], m, draw_TK),
                row.entry(t, head),
            ]
            for head, entries in enumerate(held)
        ]
        o_HD, weights = attend(row, t, held)
        held = add_received(1.0)(row, held, weights)
        yield o_HD, held
