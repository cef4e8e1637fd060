"""A scorer's files: the same scorer comes back, and only for the model and the sizes it was trained for."""

import json

import chex
import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file, save_file

from kvpop_jax.errors import UserError
from kvpop_jax.models import LoadedModel, ModelConfig
from kvpop_jax.scorers import MLPSettings, MLSTMSettings, dims_of
from kvpop_jax.scorers.files import load_scorer, make_scorer, save_scorer

CONFIG = ModelConfig(
    family="qwen3", vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tie_embeddings=True, qk_norm=True,
    max_position=64, bos_token_id=None, eos_token_ids=(0,), pad_token_id=0,
)  # fmt: skip
MODEL = LoadedModel(CONFIG, None, None, source="models/base", fingerprint="a" * 64)


@pytest.fixture(
    params=[MLSTMSettings(skip_width=4, forget_bias=(3.0, 5.0)), MLPSettings(width=6)], ids=["mlstm", "mlp"]
)
def exported(request, tmp_path):
    scorer = make_scorer(request.param, dims_of(CONFIG))
    params = [scorer.init(jax.random.key(layer)) for layer in range(CONFIG.num_layers)]
    save_scorer(
        tmp_path, MODEL, scorer, request.param, params,
        policy="kvpop", sinks=2, window=4, budgets={64: 50, 32: 18}, pin_prompt=False,
    )  # fmt: skip
    return tmp_path, scorer, params


@pytest.mark.core
def test_the_same_scorer_comes_back(exported):
    folder, scorer, params = exported
    loaded = load_scorer(folder, MODEL, sinks=2, window=4, budgets=[32])
    chex.assert_trees_all_equal(loaded.params, params)
    keys = jax.random.split(jax.random.key(9), 3)
    hidden, k, v = (
        jax.random.normal(key, (1, 12, *size)) for key, size in zip(keys, [(32,), (2, 8), (2, 8)], strict=True)
    )

    def scores(scorer):
        run = jax.jit(lambda *x: scorer.parallel(params[1], scorer.init_state(1, 4), *x, delay=4)[0])
        return run(hidden, k, v, jnp.ones((1, 12), int))

    chex.assert_trees_all_equal(scores(loaded.scorer), scores(scorer))
    assert (loaded.policy, loaded.sinks, loaded.window, loaded.budgets) == ("kvpop", 2, 4, (64, 32))
    assert len(loaded.fingerprint) == 64


def test_the_description_says_what_the_scorer_is_for(exported):
    description = json.loads((exported[0] / "scorer.json").read_text())
    assert description["format_version"] == 1
    assert description["base"] == {
        "source": "models/base", "fingerprint": "a" * 64,
        "num_layers": 3, "hidden_size": 32, "num_kv_heads": 2, "head_dim": 8,
    }  # fmt: skip
    assert (description["sinks"], description["window"], description["pools"]) == (2, 4, [50, 18])
    assert description["lambda"] == [[1e-4, 1e-4]] * 3


@pytest.mark.core
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"sinks": 4}, ["sinks", "2", "4"]),
        ({"window": 32}, ["window", "4", "32"]),
        ({"budgets": [64, 48]}, ["budgets", "64, 32", "48"]),
    ],
)
def test_other_sizes_are_refused(exported, sizes, words):
    with pytest.raises(UserError) as caught:
        load_scorer(exported[0], MODEL, **sizes)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.core
def test_another_base_model_is_refused(exported):
    other = LoadedModel(CONFIG, None, None, source="models/other", fingerprint="b" * 64)
    with pytest.raises(UserError, match=r"models/base \(a{12}\), not to models/other \(b{12}\)"):
        load_scorer(exported[0], other)


def test_broken_exports_are_named(exported, tmp_path):
    folder = exported[0]
    with pytest.raises(UserError, match=r"nowhere/scorer\.json is missing"):
        load_scorer(tmp_path / "nowhere", MODEL)
    weights, description = folder / "scorer.safetensors", folder / "scorer.json"
    whole, text = weights.read_bytes(), description.read_text()
    weights.write_bytes(whole[:-8])
    with pytest.raises(UserError, match=r"scorer\.safetensors"):
        load_scorer(folder, MODEL)
    weights.write_bytes(whole)
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if name != "layers.1.log_decay_K"}, weights)
    with pytest.raises(UserError, match=r"layers\.1\.log_decay_K"):
        load_scorer(folder, MODEL)
    save_file(tensors | {"layers.1.log_decay_K": tensors["layers.1.log_decay_K"][:1]}, weights)
    with pytest.raises(UserError, match=r"shape \(1,\)"):
        load_scorer(folder, MODEL)
    description.write_text(text.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(UserError, match="format_version is 2"):
        load_scorer(folder, MODEL)
    description.write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_scorer(folder, MODEL)
