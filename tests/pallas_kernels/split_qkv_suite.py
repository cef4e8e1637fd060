"""The suite every back end of `split_qkv` runs: subclass `SplitQkvSuite` and name the back end.

The judge is the definition in NumPy, complex numbers and float64.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import assert_close

from pallas_kernels import split_qkv

EPS = 1e-3


@dataclass(frozen=True)
class Case:
    """Tokens, KV heads, queries for each, and whether there are norms."""

    tokens: tuple[int, ...]
    kv_heads: int
    group: int
    norms: bool


CASES = {
    "qwen3": Case(tokens=(2, 1), kv_heads=2, group=4, norms=True),
    "llama_without_norms": Case(tokens=(1,), kv_heads=1, group=2, norms=False),
    "as_many_queries_as_fit": Case(tokens=(1, 1), kv_heads=1, group=7, norms=True),
}


def random_inputs(case: Case, dtype: str = "bfloat16", head_dim: int = 128):
    """(qkv, rotation, norm of queries, norm of keys); heads differ in size."""
    rng = np.random.default_rng(0)
    size = 2.0 ** np.arange(case.group + 2)[:, None]
    qkv = jnp.asarray(rng.normal(size=(*case.tokens, case.kv_heads, case.group + 2, head_dim)) * size, dtype)
    angle = rng.uniform(-4, 4, size=(*case.tokens, head_dim // 2))
    rotation = tuple(
        jnp.asarray(table, jnp.promote_types(dtype, "float32")) for table in (np.cos(angle), np.sin(angle))
    )
    norms = (jnp.asarray(rng.normal(size=head_dim), dtype) if case.norms else None for _ in range(2))
    return qkv, rotation, *norms


def by_definition(qkv, rotation, q_norm_D, k_norm_D):
    """q, k and v in float64."""
    qkv, *rotation = (np.asarray(x, np.float64) for x in (qkv, *rotation))
    turn = (rotation[0] + 1j * rotation[1])[..., None, :]

    def of(x, norm_D):
        if norm_D is not None:
            x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * np.asarray(norm_D, np.float64)
        half = x.shape[-1] // 2
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    q = qkv[..., :-2, :].reshape(*qkv.shape[:-3], -1, qkv.shape[-1])
    return of(q, q_norm_D), of(qkv[..., -2, :], k_norm_D), qkv[..., -1, :]


class SplitQkvSuite:
    """What any back end must satisfy."""

    backend: str
    tolerance = 2**-6  # twice rounded to 8 bits, and sums of two

    @pytest.mark.parametrize("name", CASES)
    def test_every_head_is_normed_and_turned_as_defined(self, name):
        inputs = random_inputs(CASES[name])
        results = jax.jit(lambda *a: split_qkv(*a, eps=EPS, backend=self.backend))(*inputs)
        for got, wanted in zip(results, by_definition(*inputs), strict=True):
            assert got.dtype == jnp.bfloat16
            for head in range(wanted.shape[-2]):  # each by its own size
                assert_close(np.asarray(got[..., head, :], np.float64), wanted[..., head, :], self.tolerance)
