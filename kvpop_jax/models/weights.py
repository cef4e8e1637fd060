"""From named tensors in files to `DecoderParams`, and back; shared by the Hugging Face and the GGUF loader.

A format is a table from our field names to its tensor names. Both formats store matrices as (out, in), so every
projection and the head are transposed; the embedding is (V, E) everywhere.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten_with_path, tree_map_with_path

from kvpop_jax.errors import UserError
from kvpop_jax.models.config import ModelConfig
from kvpop_jax.models.decoder import DecoderParams, init_params

Names = Mapping[str, str]
"""Field of `DecoderParams` or `LayerParams` -> tensor name, with `{}` for the layer index."""


def stored_shapes(config: ModelConfig, names: Names) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a file of this format holds for a model of this shape."""
    leaves, _ = tree_flatten_with_path(_param_shapes(config))
    return {_tensor_name(path, names): _turned(path, leaf.shape) for path, leaf in leaves}


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    *,
    optional: Callable[[str], bool],
    where: str,
    file_of: Callable[[str], str],
) -> None:
    """Compare what a model needs with what its files hold.

    Args:
        optional: says of a tensor that is not expected whether it may be there all the same.
        where: the model's folder or file; `file_of` the file that holds a found tensor.

    Raises:
        UserError: one line with every missing, unexpected and wrongly shaped tensor (long lists cut).
    """
    missing = [name for name in expected if name not in found]
    unexpected = [f"{name} in {file_of(name)}" for name in found if name not in expected and not optional(name)]
    wrong = [
        f"{name} in {file_of(name)} is {list(found[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    faults = {"missing tensors": missing, "unexpected tensors": unexpected, "wrong shapes": wrong}
    if any(faults.values()):
        lines = [f"{kind} ({len(names)}): {_shortened(names)}" for kind, names in faults.items() if names]
        raise UserError(f"{where} does not hold the weights its configuration describes: {'; '.join(lines)}")


def read_params(
    config: ModelConfig, names: Names, read: Callable[[str], np.ndarray], dtype: jnp.dtype
) -> DecoderParams:
    """Build the parameters from `read(tensor name)`, one tensor at a time, cast to `dtype`."""

    def load(path: tuple[Any, ...], _: jax.ShapeDtypeStruct) -> jax.Array:
        stored = read(_tensor_name(path, names))
        return jnp.asarray(stored.T if _is_turned(path) else stored, dtype)

    return tree_map_with_path(load, _param_shapes(config))


def named_tensors(params: DecoderParams, names: Names, dtype: jnp.dtype) -> dict[str, np.ndarray]:
    """The inverse of `read_params`: contiguous host arrays by tensor name."""
    leaves, _ = tree_flatten_with_path(params)
    tensors = {_tensor_name(path, names): (np.asarray(leaf, dtype), _is_turned(path)) for path, leaf in leaves}
    # safetensors writes the buffer as it lies in memory: a transposed view would be saved untransposed.
    return {name: np.ascontiguousarray(array.T if turned else array) for name, (array, turned) in tensors.items()}


def default_dtype() -> jnp.dtype:
    """float32 on a CPU, bfloat16 on an accelerator."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def _param_shapes(config: ModelConfig) -> DecoderParams:
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.dtype(jnp.float32)))


def _tensor_name(path: tuple[Any, ...], names: Names) -> str:
    if len(path) == 1:
        return names[path[0].name]
    _, layer, field = path
    return names[field.name].format(layer.idx)


def _is_turned(path: tuple[Any, ...]) -> bool:
    return path[-1].name.endswith("_proj") or path[-1].name == "head_EV"


def _turned(path: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1] if _is_turned(path) else shape


def _shortened(names: Iterable[str], limit: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
