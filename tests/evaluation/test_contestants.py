"""Policies made of two, in an evaluation: whose scorer, whose parameters, which budget."""

import pytest
from inference.tiny_model import CONFIG, SCORERS, random_scorer, tiny_model

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.contestants import contestants_of
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.polykv import LayerChoice, Plan, write_plan
from kvpop_jax.scorers.files import LoadedScorer

PARAMS = {name: [random_scorer(name, layer) for layer in range(CONFIG.num_layers)] for name in ("kvpop", "kvpop_mlp")}
TRAINED = {
    name: LoadedScorer(
        name, SCORERS[name], params, sinks=2, window=8, budgets=(64,), pin_prompt=False, fingerprint=name
    )
    for name, params in PARAMS.items()
}


@pytest.mark.core
def test_each_half_of_a_policy_gets_its_own_scorer():
    names = ("snapkv+kvpop", "kvpop+kvpop_mlp", "kvpop", "tova+h2o")
    made = {x.policy: x for x in contestants_of(tiny_model(), EvalSettings(policies=names, budgets=(64,)), TRAINED)}
    mlstm, mlp = PARAMS["kvpop"], PARAMS["kvpop_mlp"]
    assert made["snapkv+kvpop"].generator.scorers == [(None, own) for own in mlstm]
    assert made["kvpop+kvpop_mlp"].generator.scorers == list(zip(mlstm, mlp, strict=True))
    assert made["kvpop"].generator.scorers == mlstm
    assert made["tova+h2o"].generator.scorers is None
    assert [made[name].scorer_fingerprint for name in names] == ["kvpop", "kvpop+kvpop_mlp", "kvpop", None]
    assert {x.name for x in made.values()} == {f"{name} 64" for name in names}


@pytest.mark.core
def test_a_half_without_its_scorer_or_name_is_refused():
    for name, message in (("h2o+kvpop", "policy kvpop needs a trained scorer"), ("h2o+x", "unknown policy 'h2o\\+x'")):
        with pytest.raises(UserError, match=message):
            contestants_of(tiny_model(), EvalSettings(policies=(name,), budgets=(64,)), {})
    with pytest.raises(UserError, match="a budget of 65 was asked for; the scorer of kvpop was trained for 64"):
        contestants_of(tiny_model(), EvalSettings(policies=("tova+kvpop",), budgets=(65,)), TRAINED)


def write(path, *layers, sinks=2):
    model = {"source": "tiny", "fingerprint": "tiny"}
    write_plan(path, Plan(path.stem, model, {}, {}, 64, sinks, 8, layers))
    return EvalSettings(policies=("dense",), plan=(str(path),))


@pytest.mark.core
def test_a_plan_gives_every_layer_its_policy_budget_and_scorer(tmp_path):
    layers = LayerChoice("snapkv", "kvpop", 64), LayerChoice("tova", "tova", 64)
    settings = write(tmp_path / "mine.yaml", *layers)
    _, planned = contestants_of(tiny_model(), settings, TRAINED)
    assert (planned.policy, planned.budget, planned.name) == ("mine", 64, "mine 64")
    assert [policy.name for policy in planned.generator.policies] == ["snapkv+kvpop", "tova"]
    assert planned.generator.scorers == [(None, PARAMS["kvpop"][0]), None]
    assert planned.scorer_fingerprint.endswith("+kvpop")
    uneven = write(tmp_path / "mine.yaml", LayerChoice("h2o", "h2o", 100), LayerChoice("tova", "tova", 28))
    assert [plan.budget for plan in contestants_of(tiny_model(), uneven, {})[1].generator.plans(0)] == [100, 28]


@pytest.mark.core
def test_a_plan_that_cannot_be_run_here_is_refused(tmp_path):
    uneven = write(tmp_path / "p.yaml", LayerChoice("kvpop", "kvpop", 66), LayerChoice("tova", "tova", 62))
    with pytest.raises(UserError, match="a budget of 66 was asked for; the scorer of kvpop was trained for 64"):
        contestants_of(tiny_model(), uneven, TRAINED)
    with pytest.raises(UserError, match="policy kvpop needs a trained scorer"):
        contestants_of(tiny_model(), uneven, {})
    small = write(
        tmp_path / "p.yaml", LayerChoice("streaming_llm", "streaming_llm", 3), LayerChoice("tova", "tova", 125)
    )
    with pytest.raises(UserError, match="budget 3 leaves no pool"):
        contestants_of(tiny_model(), small, {})
    other = write(tmp_path / "p.yaml", *[LayerChoice("tova", "tova", 64)] * 3)
    with pytest.raises(UserError, match="has 3 layers; the model has 2"):
        contestants_of(tiny_model(), other, {})
    clash = write(tmp_path / "tova.yaml", *[LayerChoice("tova", "tova", 64)] * 2)
    with pytest.raises(UserError, match="two contestants are called tova 64"):
        contestants_of(tiny_model(), EvalSettings(policies=("tova",), budgets=(64,), plan=clash.plan), {})
