"""Where arrays lie on a mesh: one builder, one table of axes, and explicit shardings made from the names of fields.

The axes of every mesh are `data` (rows), `fsdp` (rows, and weights cut along the hidden axis) and `model` (heads and
feed-forward columns). KV heads lie on `model` and rows on the other two, so an eviction, which concerns one head of one
row, never needs a collective.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvpop_jax.errors import UserError
from kvpop_jax.models.config import ModelConfig
from pallas_kernels.meshes import MESH_AXES

AXIS_NAMES = "data", "fsdp", "model"

RULES: dict[str, tuple[str, ...]] = {**MESH_AXES, "E": ("fsdp",), "F": ("model",)}
"""Mesh axes by axis letter. An array uses each at most once, its first letter first: hidden states keep E whole."""

MATRICES = {"qkv_proj": "EKJD", "o_proj": "HE", "gate_up_proj": "E2F", "down_proj": "FE"}
"""Axes of the fields whose names do not end in them."""


def make_mesh(data: int = 1, fsdp: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of those sizes, `model` innermost: what talks most is closest.

    Raises:
        UserError: the sizes do not multiply up to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = data, fsdp, model
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh data={data}, fsdp={fsdp}, model={model} needs {math.prod(sizes)} devices, not {len(devices)}"
        )
    return Mesh(np.array(devices).reshape(sizes), AXIS_NAMES, axis_types=(AxisType.Auto,) * 3)


def check(config: ModelConfig, mesh: Mesh, batch_size: int) -> None:
    """Refuses sizes that the mesh does not divide.

    Raises:
        UserError: naming the size and the mesh axis.
    """
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    wanted = (
        ("num_kv_heads", config.num_kv_heads, "model", mesh.shape["model"], "an eviction must not cross devices"),
        ("intermediate_size", config.intermediate_size, "model", mesh.shape["model"], "columns are cut evenly"),
        ("hidden_size", config.hidden_size, "fsdp", mesh.shape["fsdp"], "weights are cut evenly along it"),
        ("batch_size", batch_size, "data x fsdp", rows, "every device works on whole rows"),
    )
    for name, size, axis, parts, reason in wanted:
        if size % parts:
            raise UserError(f"{name} {size} does not divide over {parts} devices of mesh axis {axis}: {reason}")


def spec_of(letters: str, mesh: Any) -> PartitionSpec:
    """The partition of an array with those axes."""
    free, axes = set(mesh.axis_names), []
    for letter in letters:
        names = tuple(name for name in RULES.get(letter, ()) if name in free)
        free -= set(names)
        axes.append(names or None)
    return PartitionSpec(*axes)


def axes_of(path: Sequence[Any], ndim: int) -> str:
    """Axis letters of a leaf, read off the last named field on the way to it; "" for one that lies everywhere.

    Stacked layers put axes in front that no rule knows.
    """
    names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    if not names:
        return ""
    suffix = re.search(r"_([A-Z]+)\d*$", names[-1])
    letters = MATRICES.get(names[-1]) or (suffix[1] if suffix else "")
    return "." * (ndim - len(letters)) + letters if 0 < len(letters) <= ndim else ""


def shardings_of(tree: Any, mesh: Mesh) -> Any:
    """A `NamedSharding` for every leaf of weights, optimizer state, batch or caches."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec_of(axes_of(path, leaf.ndim), mesh)), tree
    )


def placed(shapes: Any, mesh: Mesh) -> Any:
    """The shapes with their shardings: what to lower a program for."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings_of(shapes, mesh),
    )


def mesh_in_use() -> Any:
    """The mesh that a program is traced under; None without one that has our axes, and inside `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_names) != set(AXIS_NAMES) or AxisType.Manual in mesh.axis_types:
        return None
    return mesh


def constrain(x: jax.Array, letters: str) -> jax.Array:
    """`x` with its first axes placed by the rules; the same without a mesh."""
    mesh = mesh_in_use()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, spec_of(letters, mesh))


def constrain_weights(tree: Any) -> Any:
    """Gradients placed as their weights are, which makes the sum over devices a scatter."""
    mesh = mesh_in_use()
    if mesh is None:
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.lax.with_sharding_constraint(leaf, spec_of(axes_of(path, leaf.ndim), mesh)), tree
    )


def gathered(x: jax.Array) -> jax.Array:
    """`x` whole on every device."""
    return constrain(x, "")


def rows_per_shard(rows: int) -> int:
    """Rows of a batch on each device."""
    mesh = mesh_in_use()
    return rows if mesh is None else max(1, rows // (mesh.shape["data"] * mesh.shape["fsdp"]))
