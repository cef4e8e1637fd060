"""What predicts the attention a token will still receive, one set of parameters per layer.

- `base`: what a scorer is (`Scorer`), its features, the age decay.
- `mlstm`: a matrix memory per KV head, read when a token leaves the window.
- `mlp`: a token's own key and value, nothing else.
- `files`: a trained scorer as safetensors and JSON, tied to its base model.
- `module`: the Flax shell around the parameters of all layers.

The score head starts at zero, so training starts as StreamingLLM: with lambda > 0 the first ranking is recency.
"""

from kvpop_jax.scorers.base import DecayMode, Scorer, ScorerDims, dims_of
from kvpop_jax.scorers.mlp import MLPParams, MLPSettings, mlp_scorer
from kvpop_jax.scorers.mlstm import MLSTMParams, MLSTMSettings, mlstm_scorer
from kvpop_jax.scorers.module import ScorerModule

__all__ = [
    "DecayMode",
    "MLPParams",
    "MLPSettings",
    "MLSTMParams",
    "MLSTMSettings",
    "Scorer",
    "ScorerDims",
    "ScorerModule",
    "dims_of",
    "mlp_scorer",
    "mlstm_scorer",
]
