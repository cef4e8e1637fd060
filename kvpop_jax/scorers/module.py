"""The Flax shell around a scorer: the parameters of all layers as one nnx module."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from kvpop_jax.scorers.base import Scorer


class ScorerModule(nnx.Module):
    """Holds one set of parameters per layer; split it once and use the scorer's pure functions on `params`."""

    def __init__(self, scorer: Scorer, num_layers: int, key: Array):
        self.scorer = scorer
        layers = [scorer.init(layer_key) for layer_key in jax.random.split(key, num_layers)]
        self.layers = nnx.data(jax.tree.map(nnx.Param, layers))

    @property
    def params(self) -> list[Any]:
        """The parameters as plain arrays, one entry per layer."""
        return nnx.as_pure(self.layers)
