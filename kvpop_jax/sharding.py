"""Where arrays lie on a mesh: one builder, one table of axes, and explicit shardings made from the names of fields.

The axes of every mesh are `data` (rows), `fsdp` (rows, and weights cut along the hidden axis) and `model` (heads and
feed-forward columns). KV heads lie on `model` and rows on the other two, so an eviction, which concerns one head of one
row, never needs a collective.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvpop_jax.errors import UserError
from pallas_kernels.meshes import MESH_AXES

if TYPE_CHECKING:  # models load themselves onto meshes
    from kvpop_jax.models.config import ModelConfig

AXIS_NAMES = "data", "fsdp", "model"

RULES: dict[str, tuple[str, ...]] = {**MESH_AXES, "E": ("fsdp",), "F": ("model",)}
"""Mesh axes by axis letter. An array uses each at most once, its first letter first: hidden states keep E whole."""

MATRICES = {"qkv_proj": "EKJD", "o_proj": "HE", "gate_up_proj": "E2F", "down_proj": "FE"}
"""Axes of the fields whose names do not end in them."""


@dataclass(frozen=True)
class MeshSettings:
    """How many devices share what; their product is the number of devices.

    Attributes:
        data: Parts that the rows are cut into; each holds all weights. Several TPU slices lie along this axis.
        fsdp: Parts that the rows are cut into, and the weights with them, gathered layer by layer when they are needed.
        model: Parts that KV heads and feed-forward columns are cut into; divides the number of KV heads.
    """

    data: int = 1
    fsdp: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        for name in AXIS_NAMES:
            if getattr(self, name) < 1:
                raise UserError(f"mesh.{name} is {getattr(self, name)}; it must be at least 1")

    def only_model(self, what: str) -> None:
        """Refuses to cut rows, for `what` has to hand them out one by one."""
        if self.data * self.fsdp > 1:
            raise UserError(f"{what}: data is {self.data} and fsdp {self.fsdp}; both must be 1, only model may be more")


def global_mesh(settings: MeshSettings) -> Mesh:
    """The mesh of a whole run. A single process may leave devices out; several must use all of theirs.

    Raises:
        UserError: there are not as many devices.
    """
    devices = jax.devices()
    return _arranged_mesh(settings, devices[: _size(settings)] if jax.process_count() == 1 else devices)


def local_mesh(settings: MeshSettings) -> Mesh:
    """A mesh of this process's own devices, or of some of them: for work that processes do apart.

    Raises:
        UserError: it has not as many devices.
    """
    return _arranged_mesh(settings, jax.local_devices()[: _size(settings)])


def _size(settings: MeshSettings) -> int:
    return settings.data * settings.fsdp * settings.model


def _arranged_mesh(settings: MeshSettings, devices: Sequence[jax.Device]) -> Mesh:
    """`make_mesh` with TPU devices in the order that gives neighbours in the mesh the links between neighbours."""
    sizes = settings.data, settings.fsdp, settings.model
    if devices[0].platform == "tpu" and math.prod(sizes) == len(devices) > 1:
        devices = arranged(sizes, devices).ravel().tolist()
    return make_mesh(*sizes, devices=devices)


def arranged(sizes: tuple[int, int, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """TPU devices as an array of those sizes; slices, which only a network joins, along the first axis.

    Raises:
        UserError: the first size is not a multiple of the number of slices.
    """
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    data, *inner = sizes
    if data % slices:
        raise UserError(f"mesh.data is {data}; it must be a multiple of the {slices} slices, which lie along it")
    return mesh_utils.create_hybrid_device_mesh(
        (data // slices, *inner), (slices, 1, 1), devices, allow_split_physical_axes=True
    )


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


def check(config: "ModelConfig", mesh: Mesh, batch_size: int | None = None) -> None:
    """Refuses sizes that the mesh does not divide; without a batch size, those of the weights.

    Raises:
        UserError: naming the size and the mesh axis.
    """
    model, fsdp = mesh.shape["model"], mesh.shape["fsdp"]
    _check("num_kv_heads", config.num_kv_heads, "model", model, "an eviction must not cross devices")
    _check("intermediate_size", config.intermediate_size, "model", model, "columns are cut evenly")
    _check("hidden_size", config.hidden_size, "fsdp", fsdp, "weights are cut evenly along it")
    if batch_size is not None:
        check_rows(batch_size, mesh)


def check_rows(batch_size: int, mesh: Mesh, name: str = "batch_size") -> None:
    """Refuses a number of rows, called `name`, that the mesh does not divide.

    Raises:
        UserError: naming the number and the mesh axes.
    """
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    _check(name, batch_size, "data x fsdp", parts, "every device works on whole rows")


def _check(name: str, size: int, axis: str, parts: int, reason: str) -> None:
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


def place(tree: Any, mesh: Mesh) -> Any:
    """Arrays that every process has whole, laid on the mesh."""

    def lay(x: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(lay, tree, shardings_of(tree, mesh))


def make_on(mesh: Mesh, make: Callable[..., Any], *arguments: Any) -> Any:
    """`make(*arguments)` with every result made where it belongs."""
    placed_at = shardings_of(jax.eval_shape(make, *arguments), mesh)
    return jax.jit(make, out_shardings=placed_at)(*arguments)


def on_host(tree: Any, keep: bool) -> Any:
    """Whole arrays in this process's memory. Every process must call it; those that do not `keep` them get None."""

    def fetch(leaf: jax.Array) -> np.ndarray | None:
        if not leaf.is_fully_addressable:
            assert isinstance(leaf.sharding, NamedSharding)
            leaf = jax.jit(_same, out_shardings=NamedSharding(leaf.sharding.mesh, PartitionSpec()))(leaf)
        return np.asarray(leaf) if keep else None

    return jax.tree.map(fetch, tree)


def _same(x: jax.Array) -> jax.Array:
    return x


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
