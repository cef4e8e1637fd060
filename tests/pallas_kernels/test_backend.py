"""The choice of a back end: honoured or refused, never replaced."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.backend import Backend, BackendError, platform, select_backend


def _too_long(size):
    return "takes at most 4 tokens" if size > 4 else None


TABLE = {"tpu": Backend(None, "tpu", _too_long), "reference": Backend(None)}


def test_auto_never_picks_a_kernel_of_another_platform():
    assert select_backend("op", "auto", TABLE, (3,)) == "reference"


@pytest.mark.parametrize(("size", "expected"), [(3, "tpu"), (5, "reference")])
def test_auto_picks_the_first_form_for_the_platform_that_takes_the_arguments(monkeypatch, size, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert select_backend("op", "auto", TABLE, (size,)) == expected


def test_auto_passes_over_a_form_that_does_not_pay():
    table = {"kernel": Backend(None, pays=lambda size: size > 4), "reference": Backend(None)}
    assert [select_backend("op", "auto", table, (size,)) for size in (3, 5)] == ["reference", "kernel"]
    assert select_backend("op", "kernel", table, (3,)) == "kernel"


def test_a_form_asked_for_by_name_is_not_replaced_when_it_refuses():
    assert select_backend("op", "tpu", TABLE, (3,)) == "tpu"
    with pytest.raises(BackendError, match="op: backend='tpu' takes at most 4 tokens; use 'auto'"):
        select_backend("op", "tpu", TABLE, (5,))


def test_the_mesh_in_use_says_which_platform_a_program_is_for():
    described = AbstractMesh((1,), ("data",), abstract_device=AbstractDevice("TPU v5p", 1, "tpu"))
    with jax.sharding.use_abstract_mesh(described):
        assert platform() == "tpu"
    assert platform() == "cpu"
