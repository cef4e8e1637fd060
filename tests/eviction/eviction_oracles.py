"""Rows to evict from, drawn by hypothesis, and the rule itself written as a cache that deletes, step by step."""

from dataclasses import dataclass

import jax
import numpy as np
from hypothesis import strategies as st
from oracles import documents, segment_rows

from kvpop_jax.eviction import TokenLayout, token_layout

BATCH, HEADS, LENGTH = 2, 2, 24


@dataclass(frozen=True)
class Problem:
    """A packed batch and its budget. `prompt_BS` marks a prefix of each document, pinned beside the sinks."""

    segment_BS: np.ndarray
    prompt_BS: np.ndarray
    sinks: int
    window: int
    pool_B: np.ndarray

    @property
    def layout_arguments(self) -> dict:
        return {"segment_BS": self.segment_BS, "sinks": self.sinks, "pool": self.pool_B, "prompt_BS": self.prompt_BS}


@dataclass(frozen=True)
class Document:
    """One document of a problem: row, indices, how many of its first tokens are pinned, and what its pool holds."""

    row: int
    tokens: range
    pinned: range
    pool: int

    def eligible(self, query: int, window: int) -> list[int]:
        """Tokens that compete at the query: neither pinned nor in the window."""
        return [t for t in self.tokens if t not in self.pinned and t <= query - window]


layout_of = jax.jit(token_layout)
"""`token_layout`, everything traced: one compilation for all budgets."""


@st.composite
def problems(draw, prompts: bool = True, rows: int = BATCH, length: int = LENGTH) -> Problem:
    """Packed rows with padding anywhere; sinks, window and pools from nothing to more than a document holds."""
    segment_BS = segment_rows([draw(_document_lengths(length)) for _ in range(rows)], length)
    prompt_BS = np.zeros(segment_BS.shape, bool)
    if prompts and draw(st.booleans()):
        for row, segment_S in enumerate(segment_BS):
            for tokens in documents(segment_S):
                prompt_BS[row, tokens.start : tokens.start + draw(st.integers(0, len(tokens)))] = True
    return Problem(
        segment_BS,
        prompt_BS,
        sinks=draw(st.integers(0, 3)),
        window=draw(st.sampled_from([1, 1, 2, 3, 5, length + 1])),
        pool_B=np.array([draw(st.sampled_from([0, 1, 2, 3, 5, 8, length])) for _ in range(rows)], np.int32),
    )


@st.composite
def _document_lengths(draw, length: int) -> list[int]:
    if draw(st.booleans()):
        return [length]
    lengths, left = [], length
    while left and draw(st.integers(0, 4)):
        size = draw(st.integers(1, left))
        lengths.append(draw(st.sampled_from([size, size, -size])))
        left -= size
    return lengths


@st.composite
def priorities(draw, rows: int = BATCH, length: int = LENGTH) -> np.ndarray:
    """From all equal, through many ties (0 and -0 among them), to none."""
    levels = draw(st.sampled_from([1, 2, 3, 8, 2**20]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (rows, HEADS, length)
    return (rng.integers(0, levels, shape) * rng.choice([-0.25, 0.25], shape)).astype(np.float32)


def documents_of(problem: Problem) -> list[Document]:
    """Every pinned token beyond the sinks takes a slot of its document's pool."""
    result = []
    for row, segment_S in enumerate(problem.segment_BS):
        for tokens in documents(segment_S):
            prompt = int(problem.prompt_BS[row, tokens].sum())
            pinned = min(max(problem.sinks, prompt), len(tokens))
            pool = max(int(problem.pool_B[row]) - max(prompt - problem.sinks, 0), 0)
            result.append(Document(row, tokens, tokens[:pinned], pool))
    return result


def deleting_cache(priority_BKS: np.ndarray, problem: Problem) -> np.ndarray:
    """`[B, K, T, S]` what a cache holds at every step, that takes in one token a step and never gets one back."""
    B, K, S = priority_BKS.shape
    held_BKTS = np.zeros((B, K, S, S), bool)
    for document in documents_of(problem):
        for head in range(K):
            priority_S, cache, pool = priority_BKS[document.row, head], set(), set()
            for q in document.tokens:
                cache.add(q)
                leaving = q - problem.window
                if leaving in document.tokens and leaving not in document.pinned:
                    pool.add(leaving)
                if len(pool) > document.pool:
                    victim = min(pool, key=lambda t: (priority_S[t], -t))
                    pool.remove(victim)
                    cache.remove(victim)
                held_BKTS[document.row, head, q, list(cache)] = True
    return held_BKTS


def best(priority_S: np.ndarray, tokens: list[int], k: int) -> list[int]:
    """The k tokens of highest priority, best first; of equals the older comes first."""
    return sorted(tokens, key=lambda t: (-priority_S[t], t))[:k]


def top_k_mask(priority_BKS: np.ndarray, problem: Problem) -> np.ndarray:
    """`[B, K, T, S]` every query by itself: pinned tokens, window, and the best k of what lies between."""
    B, K, S = priority_BKS.shape
    seen_BKTS = np.zeros((B, K, S, S), bool)
    for document in documents_of(problem):
        for q in document.tokens:
            always = [t for t in document.tokens if t <= q and (t in document.pinned or t > q - problem.window)]
            for head in range(K):
                kept = best(priority_BKS[document.row, head], document.eligible(q, problem.window), document.pool)
                seen_BKTS[document.row, head, q, always + kept] = True
    return seen_BKTS


def numpy_layout(problem: Problem) -> TokenLayout:
    return jax.tree.map(np.asarray, layout_of(**problem.layout_arguments))
