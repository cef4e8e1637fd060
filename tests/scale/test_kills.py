"""A run that is killed ends as if nothing had happened. Its own file, so that it runs beside those of processes."""

import pytest
from scale.scripts import finish, start

pytestmark = pytest.mark.multiprocess


def test_a_run_that_is_killed_twice_loses_no_saved_step(tmp_path):
    log = tmp_path / "log"
    finish([start(["tools/kill_test.py", "--kills", "2", "--steps", "60"], log)], [log])
    assert "killed 2 times" in log.read_text() and "60 losses, equal to" in log.read_text()
