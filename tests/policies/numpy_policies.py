"""Every policy of the literature, literally and slowly, for one row: lists of entries, loops over heads.

A policy is two functions: PROMPT (row, budget) -> outputs of the prompt and what each head holds then, and
STEPS (row, held, budget) -> an iterator of (output, held), the first of it before any step and without output. So any
two make a third. Of equal scores the older token stays, everywhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import jax
import numpy as np

from kvpop_jax.policies import MethodSettings

METHODS = MethodSettings(
    observed=4, kernel=3, future=8, merged=3, decay=0.9, rkv_observed=3, rkv_kernel=3, rkv_interval=5
)
SINKS, WINDOW = 2, 3


@dataclass
class Entry:
    """A cached token of one KV head."""

    position: int
    k: np.ndarray
    v: np.ndarray
    score: float = 0.0


Held = list[list[Entry]]


@dataclass(frozen=True)
class Row:
    """A prompt of `length` tokens and what follows it; the first `pinned` tokens never leave."""

    q_THD: np.ndarray
    k_TKD: np.ndarray
    v_TKD: np.ndarray
    length: int
    pinned: int
    frequency: np.ndarray
    seed: int

    @property
    def groups(self) -> int:
        return self.q_THD.shape[1] // self.heads

    @property
    def heads(self) -> int:
        return self.k_TKD.shape[1]

    def entry(self, t: int, head: int) -> Entry:
        return Entry(t, self.k_TKD[t, head].copy(), self.v_TKD[t, head].copy())

    def prompt_entries(self) -> Held:
        return [[self.entry(t, head) for t in range(self.length)] for head in range(self.heads)]

    @cached_property
    def attention(self) -> np.ndarray:
        """Causal attention of the prompt [H, query, key]."""
        L, H, D = self.length, self.q_THD.shape[1], self.q_THD.shape[2]
        a_HLL = np.zeros((H, L, L))
        for h in range(H):
            for t in range(L):
                logits = self.k_TKD[: t + 1, h // self.groups] @ self.q_THD[t, h] / np.sqrt(D)
                a_HLL[h, t, : t + 1] = softmax(logits)
        return a_HLL

    @cached_property
    def dense_output(self) -> np.ndarray:
        per_head = [self.attention[h] @ self.v_TKD[: self.length, h // self.groups] for h in range(self.q_THD.shape[1])]
        return np.stack(per_head, axis=1)

    def group_mean(self, x_H: np.ndarray) -> np.ndarray:
        return x_H.reshape(self.heads, self.groups, *x_H.shape[1:]).mean(axis=1)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def attend(row: Row, t: int, held: Held) -> tuple[np.ndarray, list[np.ndarray]]:
    """Output [H, D] of the query at `t`, and per KV head its attention [G, entries]."""
    o_HD, weights = [], []
    for head, entries in enumerate(held):
        k, v = np.array([e.k for e in entries]), np.array([e.v for e in entries])
        own = []
        for h in range(head * row.groups, (head + 1) * row.groups):
            own.append(softmax(k @ row.q_THD[t, h] / np.sqrt(k.shape[1])))
            o_HD.append(own[-1] @ v)
        weights.append(np.array(own))
    return np.array(o_HD), weights


def split(entries: list[Entry], count: int, protected) -> tuple[list[Entry], list[Entry]]:
    """The `count` best (protected ones, then by score, then the older), and the others; both by age."""
    ranked = sorted(entries, key=lambda e: (not protected(e.position), -e.score, e.position))
    return by_age(ranked[:count]), by_age(ranked[count:])


def by_age(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda e: e.position)


def scored(held: Held, score_KL: np.ndarray) -> Held:
    return [[replace(e, score=score_KL[head][e.position]) for e in entries] for head, entries in enumerate(held)]


def cut(held: Held, count: int, protected) -> Held:
    return [split(entries, count, protected)[0] for entries in held]


def protection(row: Row, last: int, window: int, sinks: int):
    """Whether a position is protected when `last` is the youngest."""
    return lambda position: position < max(row.pinned, sinks) or position > last - window


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


def dense_prompt(row: Row, budget: int):
    return row.dense_output, row.prompt_entries()


_H2O = attend_then_evict(lambda row, held: received(row), add_received(1.0), lambda budget: (budget // 2, 0))
_SCISSORHANDS = attend_then_evict(
    lambda row, held: received(row, METHODS.decay), add_received(METHODS.decay), lambda budget: (WINDOW, SINKS)
)
_TOVA = attend_then_evict(tova_prompt, tova_rescore, lambda budget: (0, 0))
_KEYDIFF = attend_then_evict(keydiff_prompt, keydiff_rescore, lambda budget: (0, 0))
_SNAPKV = best_of_prompt(snapkv_score, METHODS.observed, 0)
_KNORM = static_policy(lambda e: -np.linalg.norm(e.k))
_STREAMING = static_policy(lambda e: e.position)

PROMPT = {
    "adakv": ada_prompt,
    "cake": best_of_prompt(cake_score, METHODS.observed, 0),
    "cam": cam_prompt,
    "d2o": d2o_prompt,
    "dense": dense_prompt,
    "expected_attention": best_of_prompt(expected_score, 0, SINKS),
    "h2o": _H2O[0],
    "keydiff": _KEYDIFF[0],
    "knorm": _KNORM[0],
    "rkv": rkv_prompt,
    "scissorhands": _SCISSORHANDS[0],
    "snapkv": _SNAPKV,
    "streaming_llm": _STREAMING[0],
    "streaming_llm_in_cache": recent_prompt,
    "tova": _TOVA[0],
}
STEPS = {
    "adakv": ada_steps,
    "cake": recency_steps,
    "cam": cam_steps,
    "d2o": d2o_steps,
    "expected_attention": recency_steps,
    "h2o": _H2O[1],
    "keydiff": _KEYDIFF[1],
    "knorm": _KNORM[1],
    "rkv": rkv_steps,
    "scissorhands": _SCISSORHANDS[1],
    "snapkv": recency_steps,
    "streaming_llm": _STREAMING[1],
    "streaming_llm_in_cache": in_cache_steps,
    "tova": _TOVA[1],
}
