"""Choosing a policy by name."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from inference.tiny_model import CONFIG, ENTRY_BYTES, SCORERS, make_policy, random_scorer, tiny_model

from kvpop_jax import policies
from kvpop_jax.errors import UserError
from kvpop_jax.inference import decode_step, prefill
from kvpop_jax.inference.decode import Setup
from kvpop_jax.policies import PolicySettings

FOLDER = Path(policies.__file__).parent
FILES = sorted(file.stem for file in FOLDER.glob("*.py") if "\ndef make(settings: PolicySettings)" in file.read_text())


@pytest.mark.core
def test_every_file_that_defines_a_policy_is_listed_and_made_under_its_own_name():
    assert policies.names() == FILES
    assert {"dense", "kvpop", "kvpop_mlp", "random", "streaming_llm", "tova"} <= set(FILES)
    for name in FILES:
        made = policies.make(name, PolicySettings(scorer=SCORERS.get(name)))
        assert made.name == name
        assert (made.prefill_mode == "expiry") == (made.priorities is not None)


@pytest.mark.parametrize("name", FILES)
def test_only_policies_that_say_so_read_the_seeds(name):
    policy = make_policy(name)
    plan = policy.plan(40, CONFIG, ENTRY_BYTES)
    setup = Setup(CONFIG, (policy,) * CONFIG.num_layers, (plan,) * CONFIG.num_layers, pin_prompt=False)
    scorers = [random_scorer(name, layer) for layer in range(CONFIG.num_layers)]
    rows = jax.ShapeDtypeStruct((2,), np.int32)
    text = jax.ShapeDtypeStruct((2, 48), np.int32)
    refusal = pytest.raises((AttributeError, TypeError, ValueError)) if "seed" in policy.signals else nullcontext()
    # There are no seeds to be read.
    with refusal:
        _, caches = jax.eval_shape(partial(prefill, setup, seed_B=None), tiny_model().params, scorers, text, rows)
        step = partial(decode_step, setup, tiny_model().params, scorers, seed_B=None)
        jax.eval_shape(step, caches, rows, rows, rows, jax.ShapeDtypeStruct((2,), bool))


@pytest.mark.core
@pytest.mark.parametrize("name", ["h3o", "base", ""])
def test_an_unknown_policy_is_refused_with_the_names_there_are(name):
    with pytest.raises(UserError) as refusal:
        policies.make(name, PolicySettings())
    assert repr(name) in str(refusal.value)
    assert all(known in str(refusal.value) for known in FILES)


@pytest.mark.parametrize("name", ["kvpop", "kvpop_mlp"])
def test_a_learned_policy_is_refused_without_its_kind_of_scorer(name):
    with pytest.raises(UserError, match=f"policy {name} needs a trained scorer"):
        policies.make(name, PolicySettings())
    other = SCORERS["kvpop_mlp" if name == "kvpop" else "kvpop"]
    with pytest.raises(UserError, match=rf"policy {name} needs a scorer of kind .*, not '{other.kind}'"):
        policies.make(name, PolicySettings(scorer=other))


@pytest.mark.parametrize(
    ("sizes", "words"), [({"window": 0}, "window must be at least 1"), ({"sinks": -1}, "sinks must")]
)
def test_sizes_that_no_cache_can_have_are_refused(sizes, words):
    """Without a window nothing would ever be given its priority: the youngest token would go, whatever the policy."""
    with pytest.raises(UserError, match=words):
        PolicySettings(**sizes)
