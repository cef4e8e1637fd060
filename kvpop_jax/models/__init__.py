"""One decoder for Qwen3 and Llama, and the doors it comes in and goes out by.

- `config`: the shape of a model, read from and written to Hugging Face's config.json.
- `rope`: rotary positions, with Llama 3.1's scaling.
- `decoder`: parameters as plain data and the forward pass as functions, with attention as a hook.
- `module`: the same as a Flax `nnx` module.
- `load`: `load_model`, for every kind of source.
- `huggingface`, `gguf`, `weights`, `tokenizer`: the file formats.
- `text`: what a user writes as tokens, and tokens as text.
"""

from kvpop_jax.models.config import ModelConfig, RopeScaling
from kvpop_jax.models.decoder import (
    Attend,
    DecoderParams,
    LayerInputs,
    LayerParams,
    apply_layer,
    apply_layers,
    forward,
    init_params,
    layer_inputs,
    segment_positions,
    unembed,
)
from kvpop_jax.models.gguf import smollm2_path
from kvpop_jax.models.huggingface import save_model
from kvpop_jax.models.load import LoadedModel, fingerprint, load_model
from kvpop_jax.models.module import Decoder
from kvpop_jax.models.rope import rope_frequencies, rope_rotation
from kvpop_jax.models.text import Message, Style, chat_text, decode_text, encode_messages, encode_prompt, text_pieces
from kvpop_jax.models.tokenizer import load_tokenizer
from kvpop_jax.models.weights import default_dtype

__all__ = [
    "Attend",
    "Decoder",
    "DecoderParams",
    "LayerInputs",
    "LayerParams",
    "LoadedModel",
    "Message",
    "ModelConfig",
    "RopeScaling",
    "Style",
    "apply_layer",
    "apply_layers",
    "chat_text",
    "decode_text",
    "default_dtype",
    "encode_messages",
    "encode_prompt",
    "fingerprint",
    "forward",
    "init_params",
    "layer_inputs",
    "load_model",
    "load_tokenizer",
    "rope_frequencies",
    "rope_rotation",
    "save_model",
    "segment_positions",
    "smollm2_path",
    "text_pieces",
    "unembed",
]
