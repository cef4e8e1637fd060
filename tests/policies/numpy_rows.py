"""What the literal forms of policies work on: a row's tensors, and lists of entries for each KV head."""

from dataclasses import dataclass, replace
from functools import cached_property

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
