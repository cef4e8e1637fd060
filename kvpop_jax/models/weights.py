"""From named tensors in files to `DecoderParams`, and back; shared by the Hugging Face and the GGUF loader.

A format is a table from our field names to its tensor names. Both formats store matrices as (out, in), so every
projection and the head are transposed; the embedding is (V, E) everywhere. Where we hold several projections in one
matrix, a file holds each: `split_projection` and `join_projection` are the only places that know.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import tree_flatten_with_path, tree_map_with_path

from kvpop_jax.errors import UserError
from kvpop_jax.models.config import ModelConfig
from kvpop_jax.models.decoder import DecoderParams, init_params
from kvpop_jax.sharding import shardings_of

Index = tuple[slice, ...]
"""A part of an array: one slice for each axis."""

Read = Callable[[str, Index], np.ndarray]
"""(tensor name, part of it) -> that part."""

Names = Mapping[str, str]
"""Field of `DecoderParams` or `LayerParams`, or one of its `PARTS` -> tensor name, with `{}` for the layer index."""

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The projections that files hold one by one, in our order."""


def stored_shapes(config: ModelConfig, names: Names) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a file of this format holds for a model of this shape."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(params: DecoderParams) -> None:
        shapes.update({name: tensor.shape for name, tensor in _stored(params, names).items()})

    jax.eval_shape(note, _param_shapes(config))  # Abstract, so that no model is made to know its shapes.
    return shapes


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
    config: ModelConfig, names: Names, read: Read, dtype: jnp.dtype, mesh: Mesh | None = None
) -> DecoderParams:
    """Build the parameters, one at a time, cast to `dtype`.

    Args:
        read: gives the named tensor, or the part of it that is asked for.
        mesh: where they lie: every device's share is read by itself, and only by the process it belongs to. None for
            the default device.
    """
    shapes = _param_shapes(config)

    def load(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, placed: NamedSharding | None) -> jax.Array:
        field, tensors = path[-1].name, _tensor_names(path, names)
        blocks: dict[str, np.ndarray] = {}

        def block(index: Index | None) -> np.ndarray:
            assert index is not None, "JAX asks for parts of arrays"
            if str(index) not in blocks:  # several devices may hold the same
                spans = [span.indices(size)[:2] for span, size in zip(index, leaf.shape, strict=True)]
                parts = [read(*part) for part in zip(tensors, _stored_indices(field, spans, leaf.shape), strict=True)]
                if _is_turned(field):
                    parts = [part.T for part in parts]
                shape = tuple(stop - start for start, stop in spans)
                blocks[str(index)] = np.asarray(
                    join_projection(field, parts, shape) if field in PARTS else parts[0], dtype
                )
            return blocks[str(index)]

        if placed is None:
            return jnp.asarray(block((slice(None),) * len(leaf.shape)))
        return jax.make_array_from_callback(leaf.shape, placed, block)

    placed = jax.tree.map(lambda _: None, shapes) if mesh is None else shardings_of(shapes, mesh)
    return tree_map_with_path(load, shapes, placed)


def named_tensors(params: DecoderParams, names: Names, dtype: jnp.dtype) -> dict[str, np.ndarray]:
    """The inverse of `read_params`: contiguous host arrays by tensor name."""
    tensors = _stored(jax.tree.map(lambda leaf: np.asarray(leaf, dtype), params), names)
    # safetensors writes the buffer as it lies in memory: a transposed view would be saved untransposed.
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def split_projection(field: str, joined: Any) -> list[Any]:
    """A field of `PARTS`, NumPy's or JAX's array, as one (in, out) matrix per part."""
    rows = joined.shape[0]
    if field == "qkv_proj":
        pieces = joined[:, :, :-2], joined[:, :, -2], joined[:, :, -1]
        return [piece.reshape(rows, -1) for piece in pieces]
    return [joined[:, 0], joined[:, 1]]


def join_projection(field: str, parts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `split_projection`, for an array of that shape."""
    if field == "qkv_proj":
        rows, heads, _, size = shape
        return np.concatenate([part.reshape(rows, heads, -1, size) for part in parts], axis=2)
    return np.stack(parts, axis=1)


def _stored_indices(field: str, spans: list[tuple[int, int]], shape: tuple[int, ...]) -> list[Index]:
    """The part of each stored tensor that the part of a field is made of; spans are (start, stop) along its axes."""
    if field == "qkv_proj":
        E, K = (slice(*span) for span in spans[:2])
        *_, G2, D = shape
        return [(slice(K.start * rows * D, K.stop * rows * D), E) for rows in (G2 - 2, 1, 1)]
    if field == "gate_up_proj":
        return [(slice(*spans[2]), slice(*spans[0]))] * 2
    index = tuple(slice(*span) for span in spans)
    return [index[::-1] if _is_turned(field) else index]


def default_dtype() -> jnp.dtype:
    """float32 on a CPU, bfloat16 on an accelerator."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def _param_shapes(config: ModelConfig) -> DecoderParams:
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0), jnp.dtype(jnp.float32)))


def _stored(params: Any, names: Names) -> dict[str, Any]:
    """Every tensor as a file holds it, by name."""
    tensors: dict[str, Any] = {}
    for path, leaf in tree_flatten_with_path(params)[0]:
        field = path[-1].name
        parts = split_projection(field, leaf) if field in PARTS else [leaf]
        for name, part in zip(_tensor_names(path, names), parts, strict=True):
            tensors[name] = part.T if _is_turned(field) else part
    return tensors


def _tensor_names(path: tuple[Any, ...], names: Names) -> list[str]:
    fields = PARTS.get(path[-1].name, (path[-1].name,))
    return [names[field].format(path[1].idx) if len(path) > 1 else names[field] for field in fields]


def _is_turned(field: str) -> bool:
    return field.endswith("_proj") or field == "head_EV"


def _shortened(names: Iterable[str], limit: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
