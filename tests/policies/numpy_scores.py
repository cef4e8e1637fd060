"""Literal forms of policies that keep the entries with the best scores, or the latest."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from policies.numpy_rows import (
    METHODS,
    SINKS,
    WINDOW,
    Entry,
    Held,
    Row,
    attend,
    by_age,
    cut,
    protection,
    scored,
    softmax,
    split,
)

# --- Static priorities: the prompt is read like the rest, token by token.


def static(priority, row: Row, held: Held, budget: int, start: int) -> Iterator[tuple[np.ndarray, Held]]:
    for t in range(start, len(row.q_THD)):
        protected = protection(row, t, WINDOW, SINKS)
        held = [
            [replace(e, score=priority(e)) for e in entries] + [row.entry(t, head)] for head, entries in enumerate(held)
        ]
        held = cut(held, budget, protected)
        yield attend(row, t, held)[0], held


def static_policy(priority):
    def prompt(row: Row, budget: int):
        o, held = [], [[] for _ in range(row.heads)]
        for out, held in static(priority, row, held, budget, 0):  # noqa: B020
            o.append(out)
            if len(o) == row.length:
                return np.array(o), held
        raise AssertionError

    def steps(row: Row, held: Held, budget: int):
        held = [[replace(e, score=priority(e)) for e in entries] for entries in held]
        held = cut(held, budget, protection(row, row.length - 1, WINDOW, SINKS))
        yield None, held
        yield from static(priority, row, held, budget, row.length)

    return prompt, steps


# --- Scores by attention or keys; attend over one more than the budget, then drop the lowest.


def attend_then_evict(score_prompt, rescore, sizes):
    """`sizes` (budget) -> window and sinks."""

    def prompt(row: Row, budget: int):
        window, sinks = sizes(budget)
        held = scored(row.prompt_entries(), score_prompt(row, row.prompt_entries()))
        return row.dense_output, cut(held, budget, protection(row, row.length - 1, window, sinks))

    def steps(row: Row, held: Held, budget: int):
        window, sinks = sizes(budget)
        held = scored(held, score_prompt(row, held))
        held = cut(held, budget, protection(row, row.length - 1, window, sinks))
        yield None, held
        for t in range(row.length, len(row.q_THD)):
            held = [[*entries, row.entry(t, head)] for head, entries in enumerate(held)]
            o_HD, weights = attend(row, t, held)
            held = rescore(row, held, weights)
            held = cut(held, budget, protection(row, t, window, sinks))
            yield o_HD, held

    return prompt, steps


def received(row: Row, decay: float = 1.0) -> np.ndarray:
    age_L = row.length - 1 - np.arange(row.length)
    return row.group_mean(np.einsum("hqk,q->hk", row.attention, decay**age_L))


def add_received(decay: float):
    def rescore(row, held, weights):
        return [
            [replace(e, score=decay * e.score + w) for e, w in zip(entries, own.mean(axis=0), strict=True)]
            for entries, own in zip(held, weights, strict=True)
        ]

    return rescore


def tova_rescore(row, held, weights):
    mean = np.concatenate(weights).mean(axis=0)
    return [[replace(e, score=w) for e, w in zip(entries, mean, strict=True)] for entries in held]


def tova_prompt(row, held):
    return [row.attention[:, -1].mean(axis=0)] * row.heads


def key_difference(entries: list[Entry]) -> list[float]:
    unit = np.array([e.k / np.linalg.norm(e.k) for e in entries])
    anchor = unit.mean(axis=0)
    return [-(u @ anchor) / np.linalg.norm(anchor) for u in unit]


def keydiff_prompt(row, held):
    score = np.full((row.heads, row.length), -np.inf)
    for head, entries in enumerate(held):
        score[head, [e.position for e in entries]] = key_difference(entries)
    return score


def keydiff_rescore(row, held, weights):
    return [[replace(e, score=s) for e, s in zip(entries, key_difference(entries), strict=True)] for entries in held]


# --- Prompts scored by their last queries, or by the queries to come.


def observed(row: Row, reduce) -> np.ndarray:
    """[K, L]: `reduce` of the last queries' attention, an average over neighbours before them, and over the group."""
    window = METHODS.observed
    last_HWL = row.attention[:, max(row.length - window, 0) :]
    x_HL = reduce(last_HWL)[:, : max(row.length - window, 0)]
    side = METHODS.kernel // 2
    smooth_HL = np.zeros((len(x_HL), row.length))
    for t in range(x_HL.shape[1]):
        for neighbour in range(t - side, t + side + 1):
            if 0 <= neighbour < x_HL.shape[1]:
                smooth_HL[:, t] += x_HL[:, neighbour] / METHODS.kernel
    return row.group_mean(smooth_HL)


def snapkv_score(row):
    return observed(row, lambda a_HWL: a_HWL.mean(axis=1))


def cake_score(row):
    return observed(row, lambda a_HWL: a_HWL.mean(axis=1) + METHODS.cake_variance * a_HWL.var(axis=1))


def turned(row: Row, x_D: np.ndarray, positions: float) -> np.ndarray:
    """Rotary embedding as complex numbers."""
    half = len(x_D) // 2
    z = (x_D[:half] + 1j * x_D[half:]) * np.exp(1j * positions * row.frequency)
    return np.concatenate([z.real, z.imag])


def expected_score(row):
    score = np.zeros((row.heads, row.length))
    if row.length <= SINKS:
        return score
    D = row.q_THD.shape[2]
    for head in range(row.heads):
        probabilities = []
        for h in range(head * row.groups, (head + 1) * row.groups):
            q = np.array([turned(row, row.q_THD[t, h], -t) for t in range(SINKS, row.length)])
            mean, cov = q.mean(axis=0), np.cov(q.T, bias=True).reshape(D, D)
            basis = np.eye(D)
            future = range(row.length, row.length + METHODS.future)
            turn = np.mean([[turned(row, basis[i], p) for i in range(D)] for p in future], axis=0).T
            mean, cov = turn @ mean, turn @ cov @ turn.T
            k = row.k_TKD[SINKS : row.length, head]
            probabilities.append(softmax(np.array([mean @ x / np.sqrt(D) + x @ cov @ x / (2 * D) for x in k])))
        size = np.linalg.norm(row.v_TKD[SINKS : row.length, head], axis=1)
        score[head, SINKS:] = np.mean(probabilities, axis=0) * size
    return score


def best_of_prompt(score, window: int, sinks: int):
    def prompt(row: Row, budget: int):
        held = scored(row.prompt_entries(), score(row))
        return row.dense_output, cut(held, budget, protection(row, row.length - 1, window, sinks))

    return prompt


# --- The oldest goes.


def drop_oldest(row: Row, entries: list[Entry], count: int) -> tuple[list[Entry], list[Entry]]:
    aged = [replace(e, score=e.position) for e in entries]
    kept = {e.position for e in split(aged, count, lambda position: position < max(row.pinned, SINKS))[0]}
    return [e for e in entries if e.position in kept], [e for e in entries if e.position not in kept]


def recency_steps(row: Row, held: Held, budget: int | list[int]):
    counts = budget if isinstance(budget, list) else [budget] * row.heads
    held = [drop_oldest(row, entries, count)[0] for entries, count in zip(held, counts, strict=True)]
    yield None, held
    for t in range(row.length, len(row.q_THD)):
        held = [
            [*drop_oldest(row, entries, count - 1)[0], row.entry(t, head)]
            for head, (entries, count) in enumerate(zip(held, counts, strict=True))
        ]
        yield attend(row, t, held)[0], held


def recent_prompt(row: Row, budget: int):
    return row.dense_output, [drop_oldest(row, entries, budget)[0] for entries in row.prompt_entries()]


def in_cache_steps(row: Row, held: Held, budget: int):
    """Attention at ranks in the cache; what is held keeps its true positions here."""
    for out, now in recency_steps(row, held, budget):
        if out is None:
            yield None, now
            continue
        t = now[0][-1].position
        o_HD = []
        for head, entries in enumerate(now):
            k = np.array([turned(row, e.k, rank - e.position) for rank, e in enumerate(entries)])
            for h in range(head * row.groups, (head + 1) * row.groups):
                q = turned(row, row.q_THD[t, h], len(entries) - 1 - t)
                o_HD.append(softmax(k @ q / np.sqrt(len(q))) @ np.array([e.v for e in entries]))
        yield np.array(o_HD), now


# --- Ada-KV


def largest_remainders(wanted: list[float], total: int) -> list[int]:
    down = [int(np.floor(x + 1e-6)) for x in wanted]
    order = sorted(range(len(wanted)), key=lambda i: (-round(wanted[i] - down[i], 5), i))
    for i in order[: total - sum(down)]:
        down[i] += 1
    return down


def ada_cut(row: Row, held: Held, budget: int, window: int, sinks: int) -> Held:
    capacity, alpha = budget - 1, METHODS.ada_floor
    if sum(map(len, held)) <= row.heads * capacity:
        return held
    held = scored(held, snapkv_score(row))
    protected = protection(row, row.length - 1, window, sinks)
    fixed = [[e for e in entries if protected(e.position)] for entries in held]
    free = [[e for e in entries if not protected(e.position)] for entries in held]
    total = row.heads * capacity - sum(map(len, fixed))
    ranked = sorted(
        ((head, e) for head in range(row.heads) for e in free[head]), key=lambda x: (-x[1].score, x[1].position, x[0])
    )
    wins = [sum(head == h for h, _ in ranked[:total]) for head in range(row.heads)]
    wanted = [(1 - alpha) * n + alpha * total / row.heads for n in wins]
    # With at most four heads no head can win more than the slots it has, but it may have fewer tokens.
    assert all(x <= len(e) for x, e in zip(wanted, free, strict=True))
    counts = largest_remainders(wanted, total)
    return [
        by_age(keep + split(entries, count, lambda _: False)[0])
        for keep, entries, count in zip(fixed, free, counts, strict=True)
    ]


def ada_prompt(row: Row, budget: int):
    return row.dense_output, ada_cut(row, row.prompt_entries(), budget, METHODS.observed, 0)


def ada_steps(row: Row, held: Held, budget: int):
    held = ada_cut(row, held, budget, 1, SINKS)
    rest = row.heads * (budget - 1) - sum(map(len, held))
    counts = [len(e) + rest // row.heads + (head < rest % row.heads) for head, e in enumerate(held)]
    yield from recency_steps(row, held, counts)


# --- R-KV


def rkv_score(row: Row, head: int, entries: list[Entry], last: int) -> list[Entry]:
    w, lam, side = METHODS.rkv_observed, METHODS.rkv_importance, METHODS.rkv_kernel // 2
    k = np.array([e.k for e in entries])
    before = [i for i, e in enumerate(entries) if e.position <= last - w]
    if not before:
        return entries
    queries = row.q_THD[last - w + 1 : last + 1, head * row.groups : (head + 1) * row.groups]
    logits_Wn = np.max(queries @ k[before].T / np.sqrt(k.shape[1]), axis=1)
    importance = np.mean([softmax(x) for x in logits_Wn], axis=0)
    importance = [max(importance[max(i - side, 0) : i + side + 1]) for i in range(len(before))]
    unit = k / np.linalg.norm(k, axis=1, keepdims=True)
    similar = unit @ unit.T
    np.fill_diagonal(similar, 0)
    for i in range(len(k)):
        duplicates = np.flatnonzero(similar[i] > METHODS.rkv_similarity)
        if len(duplicates):
            similar[i, duplicates[-1]] = 0
    redundancy = softmax(similar.mean(axis=0))
    score = {i: lam * importance[n] - (1 - lam) * redundancy[i] for n, i in enumerate(before)}
    return [replace(e, score=score.get(i, 0.0)) for i, e in enumerate(entries)]


def rkv_capacity(row: Row, budget: int) -> int:
    D = row.q_THD.shape[2]
    state_bytes = METHODS.rkv_observed * row.groups * D * 4 + 4
    return budget - int(np.ceil(state_bytes / (2 * D * 4)))


def rkv_cut(row: Row, held: Held, budget: int, last: int) -> Held:
    protected = protection(row, last, METHODS.rkv_observed, 0)
    count = rkv_capacity(row, budget)
    return [
        entries if len(entries) <= count else split(rkv_score(row, head, entries, last), count, protected)[0]
        for head, entries in enumerate(held)
    ]


def rkv_prompt(row: Row, budget: int):
    return row.dense_output, rkv_cut(row, row.prompt_entries(), budget, row.length - 1)


def rkv_steps(row: Row, held: Held, budget: int):
    held = rkv_cut(row, held, budget, row.length - 1)
    yield None, held
    for n, t in enumerate(range(row.length, len(row.q_THD)), start=1):
        held = [[*entries, row.entry(t, head)] for head, entries in enumerate(held)]
        o_HD, _ = attend(row, t, held)
        if n % METHODS.rkv_interval == 0:
            held = rkv_cut(row, held, budget, t)
        yield o_HD, held
