"""Where arrays lie on a mesh, read off the names of their fields."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from inference.tiny_model import CONFIG
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from kvpop_jax.errors import UserError
from kvpop_jax.models import init_params
from kvpop_jax.sharding import AXIS_NAMES, check, make_mesh, shardings_of

MESH = AbstractMesh((2, 2, 2), AXIS_NAMES)


def test_weights_are_cut_by_hidden_axis_and_by_heads_and_no_head_is_parted():
    params = jax.eval_shape(partial(init_params, CONFIG, jax.random.key(0), jnp.dtype(jnp.float32)))
    found = jax.tree.map(lambda sharding: sharding.spec, shardings_of(params, MESH))
    layer = found.layers[0]
    assert layer.qkv_proj == P(
        ("fsdp",), ("model",), None, None
    )  # [E, K, G + 2, D]: a KV head with all that is its own
    assert layer.o_proj == P(("model",), ("fsdp",))
    assert layer.gate_up_proj == P(("fsdp",), None, ("model",))
    assert layer.down_proj == P(("model",), ("fsdp",))
    assert found.embedding_VE == P(None, ("fsdp",))


@pytest.mark.parametrize(
    ("changes", "batch", "says"),
    [
        ({"num_kv_heads": 3}, 4, "num_kv_heads 3 does not divide over 2 devices of mesh axis model"),
        ({"hidden_size": 31}, 4, "hidden_size 31 does not divide over 2 devices of mesh axis fsdp"),
        ({}, 6, "batch_size 6 does not divide over 4 devices of mesh axis data x fsdp"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_reason(changes, batch, says):
    sizes = {"num_kv_heads": 2, "hidden_size": 32, "intermediate_size": 64} | changes
    with pytest.raises(UserError, match=says):
        check(replace(CONFIG, **{"num_heads": sizes["num_kv_heads"], **sizes}), MESH, batch)


def test_a_mesh_must_take_all_devices():
    with pytest.raises(UserError, match=r"mesh data=2, fsdp=1, model=1 needs 2 devices, not 1"):
        make_mesh(data=2, devices=jax.devices()[:1])
