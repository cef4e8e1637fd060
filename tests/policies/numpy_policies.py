"""Every policy of the literature, literally and slowly, for one row: lists of entries, loops over heads.

A policy is two functions: PROMPT (row, budget) -> outputs of the prompt and what each head holds then, and
STEPS (row, held, budget) -> an iterator of (output, held), the first of it before any step and without output. So any
two make a third. Of equal scores the older token stays, everywhere.
"""

import numpy as np
from policies.numpy_merging import cam_prompt, cam_steps, d2o_prompt, d2o_steps
from policies.numpy_rows import METHODS, SINKS, WINDOW, Row
from policies.numpy_scores import (
    ada_prompt,
    ada_steps,
    add_received,
    attend_then_evict,
    best_of_prompt,
    cake_score,
    expected_score,
    in_cache_steps,
    keydiff_prompt,
    keydiff_rescore,
    received,
    recency_steps,
    recent_prompt,
    rkv_prompt,
    rkv_steps,
    snapkv_score,
    static_policy,
    tova_prompt,
    tova_rescore,
)


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
