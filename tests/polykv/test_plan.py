"""The plan file: what is written is read back, and what cannot be run is refused in one line."""

from dataclasses import replace

import pytest
import yaml
from inference.tiny_model import tiny_model

from kvpop_jax.errors import UserError
from kvpop_jax.polykv import LayerChoice, Plan, draw_plan, read_plan, write_plan
from kvpop_jax.polykv.choose import best
from kvpop_jax.polykv.measure import Signals

pytestmark = pytest.mark.core

PLAN = Plan(
    name="plan",
    model={"source": "tiny", "fingerprint": "tiny"},
    data={"source": "tiny_math", "budget": 20},
    chosen_by={"prefill": "ppl", "decode": "cosine", "budgets": "ppl"},
    budget=20,
    sinks=2,
    window=5,
    layers=(LayerChoice("snapkv", "h2o", 24), LayerChoice("tova", "tova", 16)),
    signals={"entropy": [1.0, 2.0]},
)


@pytest.fixture
def path(tmp_path):
    write_plan(tmp_path / "plan.yaml", PLAN)
    return tmp_path / "plan.yaml"


def test_a_plan_is_read_back_as_it_was_written(path):
    assert replace(read_plan(path), fingerprint="") == PLAN


def test_equal_layers_are_one_range_of_the_file_and_read_back_apart(path):
    three = replace(PLAN, layers=(*[LayerChoice("h2o", "h2o", 20, 12)] * 3, LayerChoice("dense", "tova", 20)))
    write_plan(path, three)
    ranges = yaml.safe_load(path.read_text())["layers"]
    assert [entry["layers"] for entry in ranges] == ["0-2", "3"]
    assert read_plan(path).layers == three.layers


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("format_version", 7, "format_version 1"),
        ("budget", 21, "add up to 40, not to 21"),
        ("layers", [{"layers": "0", "prefill": "h2o", "decode": "nope", "budget": 20}], "unknown decode policy 'nope'"),
        ("layers", [{"layers": "1", "prefill": "h2o", "decode": "h2o", "budget": 20}], "layer 0 is missing"),
        ("layers", [{"layers": "0", "prefill": "h2o", "decode": "h2o", "budget": 20}] * 2, "layer 0 is given twice"),
        ("layers", [{"layers": "0", "prefill": "h2o", "decode": "h2o"}], "field budget is missing"),
        ("layers", [{"layers": "0", "prefill": "h2o", "decode": "h2o", "budget": "many"}], "invalid literal"),
        ("model", {"source": "tiny"}, "field fingerprint is missing"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said_in_one_line(path, field, value, words):
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {field: value}))
    with pytest.raises(UserError, match=words) as error:
        read_plan(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_no_plan_or_missing_is_refused(path):
    path.write_text("a: [1")
    with pytest.raises(UserError, match="not YAML"):
        read_plan(path)
    with pytest.raises(UserError, match="no file"):
        read_plan(path.with_name("other.yaml"))


def test_a_plan_for_another_model_is_refused():
    with pytest.raises(UserError, match="was made for tiny"):
        PLAN.check_model(replace(tiny_model(), fingerprint="other"))
    with pytest.raises(UserError, match="has 1 layers; the model has 2"):
        replace(PLAN, layers=PLAN.layers[:1]).check_model(tiny_model())


def test_the_picture_is_drawn(path):
    assert draw_plan(PLAN, path.with_suffix(".png")).read_bytes().startswith(b"\x89PNG")


def test_the_best_policy_has_the_largest_cosine_or_the_smallest_rise_and_ties_go_to_the_first():
    by_name = {"a": [0.5, 0.9, 0.7], "b": [0.6, 0.1, 0.7]}
    signals = Signals([1.0, 1.0, 1.0], {"decode": by_name}, {"decode": by_name}, 1.0)
    assert best(signals, "decode", ("a", "b"), "cosine") == ["b", "a", "a"]
    assert best(signals, "decode", ("b", "a"), "ppl") == ["a", "b", "b"]
    with pytest.raises(UserError, match="cosine of c was not measured"):
        best(signals, "decode", ("a", "c"), "cosine")
