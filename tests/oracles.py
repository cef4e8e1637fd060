"""Independent, dense, slow NumPy forms of what the operations compute, and the random rows they are compared on."""

import itertools
from collections.abc import Callable, Iterator

import jax
import numpy as np


def segment_rows(rows: list[list[int]], S: int) -> np.ndarray:
    """Segment ids from the lengths of each row's documents; a negative length is padding, and so is what is left."""
    segment_BS = np.zeros((len(rows), S), np.int32)
    for segment_S, lengths in zip(segment_BS, rows, strict=True):
        stops = list(itertools.accumulate(abs(length) for length in lengths))
        assert not stops or stops[-1] <= S
        for number, (length, stop) in enumerate(zip(lengths, stops, strict=True), start=1):
            segment_S[stop - abs(length) : stop] = number if length > 0 else 0
    return segment_BS


def documents(segment_S: np.ndarray) -> list[range]:
    """The runs of one id, padding left out, of one row."""
    runs = [list(run) for _, run in itertools.groupby(range(len(segment_S)), key=lambda t: segment_S[t])]
    return [range(run[0], run[-1] + 1) for run in runs if segment_S[run[0]] > 0]


def same_segment(segment_BS: np.ndarray) -> np.ndarray:
    """`[B, T, S]`: both real and of one document."""
    return (segment_BS[:, :, None] == segment_BS[:, None, :]) & (segment_BS[:, None, :] > 0)


def visibility(expiry_BKS: np.ndarray, segment_BS: np.ndarray) -> np.ndarray:
    """`[B, K, T, S]`: key not later than the query, not expired, of the same document."""
    t_S = np.arange(segment_BS.shape[1])
    q_T1 = t_S[:, None]
    return (t_S <= q_T1) & (q_T1 < np.asarray(expiry_BKS)[:, :, None, :]) & same_segment(segment_BS)[:, None]


def dense_scores(q_BTHD: np.ndarray, k_BSKD: np.ndarray) -> np.ndarray:
    """`[B, H, T, S]` scaled scores in float64; every query head has its own copy of its KV head."""
    q_BTHD, k_BSKD = (np.asarray(x, np.float64) for x in (q_BTHD, k_BSKD))
    k_BSHD = np.repeat(k_BSKD, q_BTHD.shape[2] // k_BSKD.shape[2], axis=2)
    return np.einsum("BTHD,BSHD->BHTS", q_BTHD, k_BSHD, optimize=True) / np.sqrt(q_BTHD.shape[-1])


def log_sum_exp(x: np.ndarray) -> np.ndarray:
    """Over the last axis; -inf where every entry is."""
    top = x.max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(x - np.where(np.isfinite(top), top, 0)).sum(-1)) + top[..., 0]


def dense_lse(q_BTHD: np.ndarray, k_BSKD: np.ndarray, visible_BKTS: np.ndarray) -> np.ndarray:
    """`[B, H, T]` log-sum-exp of the visible scores, float64."""
    group = q_BTHD.shape[2] // k_BSKD.shape[2]
    return log_sum_exp(np.where(np.repeat(visible_BKTS, group, axis=1), dense_scores(q_BTHD, k_BSKD), -np.inf))


def assert_close(got, wanted, tolerance: float) -> None:
    """Equal up to `tolerance` times the largest finite entry wanted, or 1 if that is more; the same infinities."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(got[~finite], wanted[~finite])
    if finite.any():
        scale = max(np.abs(wanted[finite]).max(), 1.0)
        np.testing.assert_allclose(got[finite], wanted[finite], rtol=0, atol=tolerance * scale)


def largest_intermediate(function: Callable, *arguments: jax.ShapeDtypeStruct) -> int:
    """Elements of the largest array that `function` makes on its way, loops and nested calls included."""
    return max(_sizes(jax.make_jaxpr(function)(*arguments)))


def _sizes(jaxpr) -> Iterator[int]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield from (variable.aval.size for variable in equation.outvars)
        nested = jax.tree.leaves(tuple(equation.params.values()), is_leaf=_is_jaxpr)
        for inner in filter(_is_jaxpr, nested):
            yield from _sizes(inner)


def _is_jaxpr(value) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")
