"""Policies made of two, in an evaluation: whose scorer, whose parameters, which budget."""

import pytest
from inference.tiny_model import CONFIG, SCORERS, random_scorer, tiny_model

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.contestants import contestants_of
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.training.export import LoadedScorer

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
    with pytest.raises(UserError, match="budgets names 65; the scorer of kvpop was trained for 64"):
        contestants_of(tiny_model(), EvalSettings(policies=("tova+kvpop",), budgets=(65,)), TRAINED)
