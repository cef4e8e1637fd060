"""Lists over layers as stacked arrays: the form in which a run trains its weights.

A compiler's work grows with the number of arrays. Over a list, an optimizer step is a program of its own for every
array of every layer: of 36 layers that is five times as much as all the rest of a training step, and more than a TPU
compiler does in ten minutes. Stacked, it is as much as for one layer, and nothing is stacked anew in every step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacked:
    """A list of equal trees as one tree, each leaf with the place in the list as its first axis."""

    of_layers: Any

    def __len__(self) -> int:
        return jax.tree.leaves(self.of_layers)[0].shape[0]

    def __getitem__(self, layer: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[layer], self.of_layers)

    def __iter__(self) -> Iterator[Any]:
        return (self[layer] for layer in range(len(self)))  # an index past the end of a JAX array is no error


def stack(layers: Any) -> Any:
    """A list of equal trees, or `Stacked`, as one tree of stacked leaves; any other tree is taken to be one already."""
    if isinstance(layers, Stacked):
        return layers.of_layers
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) if isinstance(layers, list) else layers


def stack_lists(tree: Any) -> Any:
    """The tree with every list in it as `Stacked`."""
    return map_parts(lambda part: Stacked(stack(part)) if isinstance(part, list) else part, tree)


def map_parts(f: Callable[[Any], Any], tree: Any) -> Any:
    """`f` of every part: a list, a `Stacked`, or a leaf outside of them."""
    return jax.tree.map(f, tree, is_leaf=lambda part: isinstance(part, list | Stacked))
