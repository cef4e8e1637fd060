"""A training over several devices is the training on one. Its own file, so that it runs beside those of processes."""

import json
from pathlib import Path

import numpy as np
import pytest
from scale.scripts import finish, start

pytestmark = pytest.mark.multiprocess


def test_losses_on_every_mesh_equal_those_of_one_device(tmp_path):
    log = tmp_path / "log"
    process = start([str(Path(__file__).with_name("mesh_losses.py")), str(tmp_path), "stateless"], log, devices=8)
    finish([process], [log])
    found = json.loads(log.read_text().splitlines()[-1])
    one = found.pop("one")
    assert set(found) == {"data", "fsdp", "model", "mixed"}
    for mesh, steps in found.items():
        for step, (got, wanted) in enumerate(zip(steps, one, strict=True)):
            for name, value in wanted.items():
                # A KL of 1e-6 is a difference of numbers near 5: what rounding leaves of it is 1e-7.
                np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-7, err_msg=f"{mesh}, {step}, {name}")
    assert one[0]["loss"] != one[-1]["loss"]
