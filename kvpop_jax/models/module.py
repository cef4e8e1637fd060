"""The decoder as a Flax module: a thin shell for those who want nnx's tools; all computation is in `decoder`."""

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from kvpop_jax.models.config import ModelConfig
from kvpop_jax.models.decoder import DecoderParams, forward


class Decoder(nnx.Module):
    """`nnx.split` it once, then run the pure functions of `decoder` on `params` under `jax.jit`."""

    def __init__(self, config: ModelConfig, params: DecoderParams):
        self.config = config
        self.variables = nnx.data(jax.tree.map(nnx.Param, params))

    @property
    def params(self) -> DecoderParams:
        """The weights as plain arrays, in the structure that the pure functions take."""
        return nnx.as_pure(self.variables)

    def __call__(
        self, token_BT: Int[Array, "B T"], segment_BT: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Float32 logits of the dense model; see `decoder.forward`."""
        return forward(self.config, self.params, token_BT, segment_BT)
