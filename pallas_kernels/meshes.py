"""Operations under a mesh: every device runs its own rows and heads, so that no operation needs a collective.

XLA cannot cut a Pallas kernel by itself. An operation called under a mesh therefore runs inside `jax.shard_map`, cut
along the axes that its rows and KV heads are sharded over; its other axes are whole on every device.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

MESH_AXES = {"B": ("data", "fsdp"), "H": ("model",), "K": ("model",)}
"""Mesh axes by the letter of the array axis that is sharded over them, for operations."""


def per_shard(run: Callable[..., Any], arguments: Sequence[Any], takes: Sequence[Any], gives: Any) -> Any:
    """`run(*arguments)`, on each device's share of them.

    Args:
        run: an operation that treats rows and KV heads alike.
        arguments: positional.
        takes: the axis letters of each argument, or of the first axes of all its leaves, or a tree of those; None for a
            constant.
        gives: the same of the results, a tree of strings.
    """
    mesh = jax.sharding.get_abstract_mesh()
    auto = (
        ()
        if mesh.empty
        else tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual)
    )
    used = {name for names in MESH_AXES.values() for name in names} & set(auto)
    if not used or math.prod(mesh.shape[name] for name in used) == 1:
        return run(*arguments)

    def spec(letters: str) -> PartitionSpec:
        axes = (tuple(name for name in MESH_AXES.get(letter, ()) if name in used) for letter in letters)
        return PartitionSpec(*(names or None for names in axes))

    places = [place for place, letters in enumerate(takes) if letters is not None and arguments[place] is not None]

    def local(*shares: Any) -> Any:
        whole = list(arguments)
        for place, share in zip(places, shares, strict=True):
            whole[place] = share
        return run(*whole)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(jax.tree.map(spec, takes[place]) for place in places),
        out_specs=jax.tree.map(spec, gives),
        axis_names=set(auto),
        check_vma=False,  # kernels do not say how their results vary over the mesh
    )(*(arguments[place] for place in places))
