"""Hugging Face model folders: config.json and safetensors in, and a folder that transformers opens out."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvpop_jax.errors import UserError
from kvpop_jax.models.config import ModelConfig
from kvpop_jax.models.decoder import DecoderParams
from kvpop_jax.models.weights import Index, check_tensors, default_dtype, named_tensors, read_params, stored_shapes
from kvpop_jax.sharding import check

TENSOR_NAMES = {
    "embedding_VE": "model.embed_tokens.weight",
    "attention_norm_E": "model.layers.{}.input_layernorm.weight",
    "q_proj": "model.layers.{}.self_attn.q_proj.weight",
    "k_proj": "model.layers.{}.self_attn.k_proj.weight",
    "v_proj": "model.layers.{}.self_attn.v_proj.weight",
    "o_proj": "model.layers.{}.self_attn.o_proj.weight",
    "q_norm_D": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm_D": "model.layers.{}.self_attn.k_norm.weight",
    "mlp_norm_E": "model.layers.{}.post_attention_layernorm.weight",
    "gate_proj": "model.layers.{}.mlp.gate_proj.weight",
    "up_proj": "model.layers.{}.mlp.up_proj.weight",
    "down_proj": "model.layers.{}.mlp.down_proj.weight",
    "final_norm_E": "model.norm.weight",
    "head_EV": "lm_head.weight",
}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_DTYPES = ("F64", "F32", "F16", "BF16")


def read_huggingface(
    folder: Path, dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> tuple[ModelConfig, DecoderParams]:
    """Read configuration and weights of a model folder.

    Args:
        folder: holds config.json and model.safetensors, or the parts that model.safetensors.index.json lists.
        dtype: of the weights in memory; None: float32 on a CPU, bfloat16 on an accelerator.
        mesh: where the weights lie; each process reads the parts that its devices hold.

    Raises:
        UserError: naming the file, and the field or tensor, that is missing, unreadable or not what the rest says, or
            the size that the mesh does not divide.
    """
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else None
    config_file = folder / "config.json"
    config = ModelConfig.from_hf(_read_json(config_file), generation, where=str(config_file))
    if mesh is not None:
        check(config, mesh)

    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(_open_tensors(path)) for path in weight_files(folder)}
        file_of = {name: path for path, file in files.items() for name in file.keys()}  # noqa: SIM118 (not a dict)
        slices = {name: files[path].get_slice(name) for name, path in file_of.items()}
        check_tensors(
            stored_shapes(config, TENSOR_NAMES),
            {name: tuple(piece.get_shape()) for name, piece in slices.items()},
            # Old Llama exports carry the rotary frequencies; some tied ones a copy of the embedding as head.
            optional=lambda name: (
                name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == TENSOR_NAMES["head_EV"])
            ),
            where=str(folder),
            file_of=lambda name: file_of[name].name,
        )

        def read(name: str, index: Index) -> np.ndarray:
            kind = slices[name].get_dtype()
            if kind not in _DTYPES:
                raise UserError(f"{file_of[name]}: tensor {name} is {kind}; supported are {', '.join(_DTYPES)}")
            return slices[name][index]

        dtype = default_dtype() if dtype is None else jnp.dtype(dtype)
        return config, read_params(config, TENSOR_NAMES, read, dtype, mesh)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted by name.

    Raises:
        UserError: there are none, or one that the index lists is not there.
    """
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    if not (folder / _INDEX).exists():
        raise UserError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}")
    weight_map = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / _INDEX}: field 'weight_map' must map tensor names to files")
    for tensor, part in weight_map.items():
        if not (folder / part).exists():
            raise UserError(f"{folder / part} is missing; {_INDEX} says that it holds {tensor}")
    return sorted({folder / part for part in weight_map.values()})


def download(source: str) -> Path:
    """Fetch a model from the Hugging Face hub, or find it in the hub's local cache.

    Raises:
        UserError: no such model, or the hub cannot be reached.
    """
    try:
        return Path(snapshot_download(source, allow_patterns=_DOWNLOADED))
    except HfHubHTTPError as error:
        raise UserError(f"{source}: no such folder, and the Hugging Face hub refuses: {_one_line(error)}") from error
    except HFValidationError as error:
        raise UserError(f"{source}: no such folder, and not a possible name on the Hugging Face hub") from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise UserError(f"{source}: no such folder, and the Hugging Face hub cannot be reached") from error


def save_model(
    folder: str | Path, config: ModelConfig, params: DecoderParams, tokenizer: Any, dtype: DTypeLike
) -> None:
    """Write a folder that `load_model` and transformers' AutoModelForCausalLM open.

    Everything is written to a temporary folder first and then moved, so no file is ever half-written; what else an
    existing `folder` holds stays.

    Args:
        tokenizer: anything with transformers' `save_pretrained`.
        dtype: of the weights on disk.
    """
    folder, dtype = Path(folder), jnp.dtype(dtype)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: a model is saved as a folder, and this is a file")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch) / folder.name
        new.mkdir()
        _write_json(new / "config.json", config.to_hf(dtype.name))
        _write_json(new / "generation_config.json", config.generation_to_hf())
        save_file(named_tensors(params, TENSOR_NAMES, dtype), new / _SINGLE, metadata={"format": "pt"})
        shutil.copymode(new / "config.json", new / _SINGLE)  # safetensors makes its files private
        tokenizer.save_pretrained(new)
        if not folder.exists():
            os.rename(new, folder)
            return
        for path in new.iterdir():
            os.replace(path, folder / path.name)


@contextlib.contextmanager
def _open_tensors(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="np")
    except SafetensorError as error:
        raise UserError(f"{path}: not a complete safetensors file: {_one_line(error)}") from error
    with file:
        yield file


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
