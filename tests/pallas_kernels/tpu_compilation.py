"""Compiles programs for TPUs that are not there: libtpu brings the compiler, JAX describes the slice.

    compiled = compile_for("v5p", function, jax.ShapeDtypeStruct((8, 128), "float32"), ...)
    print(compiled.vmem)  # {"name of a kernel": bytes}, as the compiler allocated them

Tests that call it are marked `tpu_compile`, take the fixture `libtpu`, and run on any machine with `jax[tpu]`.
"""

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

# Before libtpu is loaded: no look-up of a cloud's metadata, and several test processes may hold it at once.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""The smallest slice of every chip that kernels are compiled for."""


_VMEM = 16 * 2**20


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program for one chip; bytes throughout.

    Attributes:
        vmem: peak scoped VMEM of every kernel, its own temporaries included, by the kernel's name.
        temporary: HBM that the program needs beside its arguments and results.
        aliased: HBM of results that stand where donated arguments stood.
        largest_array: elements of the largest array anywhere in the optimised program.
        text: the optimised program.
    """

    vmem: dict[str, int]
    temporary: int
    aliased: int
    largest_array: int
    text: str

    def assert_vmem(self, what: str, limit: int | None = None) -> None:
        """Prints what the kernels of `what` take; asserts that it is within what they ask for, or else what every chip
        gives unasked."""
        used = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in self.vmem.items())
        print(f"\n{what}: MiB of VMEM: {used}")
        assert all(0 < size < (limit or _VMEM) for size in self.vmem.values())


@cache
def chip_mesh(chip: str) -> Mesh:
    """A mesh of one chip, for `jax.set_mesh` or for shardings; raises where libtpu is missing."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices
    return Mesh(np.array(devices[:1]), ("chip",), axis_types=(AxisType.Auto,))


def compile_for(chip: str, function: Callable, *shapes: Any, donate: tuple[int, ...] = ()) -> Compiled:
    """Compiles `function` for one chip.

    Args:
        chip: a key of `TOPOLOGIES`.
        function: what to compile; it sees the chip's mesh, so that `backend="auto"` takes TPU kernels.
        shapes: its arguments as (trees of) `jax.ShapeDtypeStruct`.
        donate: places of the arguments whose memory the results may take.
    """
    mesh = chip_mesh(chip)
    placed = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), shapes)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(function, donate_argnums=donate).lower(*shapes).compile()
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    return Compiled(_vmem(text), memory.temp_size_in_bytes, memory.alias_size_in_bytes, _largest_array(text), text)


def _vmem(text: str) -> dict[str, int]:
    """Memory space 1 is VMEM. A name that several calls share keeps the largest."""
    used: dict[str, int] = {}
    for line in text.splitlines():
        if 'custom_call_target="tpu_custom_call"' in line:
            name = re.search(r"%([\w\-]+)", line)[1]
            sizes = re.findall(r'"used_scoped_memory_configs":\[\{"memory_space":"1",[^}]*"size":"(\d+)"', line)
            used[name] = max(used.get(name, 0), *map(int, sizes or ["0"]))
    return used


def _largest_array(text: str) -> int:
    shapes = re.findall(r"\b(?:pred|[a-z]+\d+)\[([\d,]+)\]", text)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)
