import json
import shutil

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvpop_jax.errors import UserError
from kvpop_jax.models import forward, load_model, save_model
from kvpop_jax.models.huggingface import read_huggingface

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
K_NORM = "model.layers.0.self_attn.k_norm.weight"


def rewrite(folder, change):
    """Apply `change` to the dictionary of the folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def split(folder):
    """Turn model.safetensors into two parts and an index."""
    tensors = load_file(folder / "model.safetensors")
    parts = {f"model-0000{n + 1}-of-00002.safetensors": list(tensors)[n::2] for n in range(2)}
    for part, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / part)
    index = {"weight_map": {name: part for part, names in parts.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def assert_refused(folder, *named):
    with pytest.raises(UserError) as error:
        read_huggingface(folder)
    message = str(error.value)
    assert str(folder) in message and "\n" not in message
    for name in named:
        assert name in message


@pytest.mark.core
def test_save_and_load_gives_identical_weights(golden, tokenizer, tmp_path):
    config, params = read_huggingface(golden, jnp.float32)
    save_model(tmp_path / "saved", config, params, tokenizer, jnp.float32)
    model = load_model(str(tmp_path / "saved"), jnp.float32)
    assert model.config == config
    chex.assert_trees_all_equal(model.params, params)
    assert model.tokenizer("w5 w6")["input_ids"] == [5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]  # no scratch is left behind


def test_bfloat16_on_disk_and_in_memory(golden, tokenizer, tmp_path):
    config, params = read_huggingface(golden, jnp.bfloat16)
    save_model(tmp_path, config, params, tokenizer, "bfloat16")
    assert load_file(tmp_path / "model.safetensors")["model.norm.weight"].dtype == jnp.bfloat16
    chex.assert_trees_all_equal(load_model(str(tmp_path), "bfloat16").params, params)


def test_transformers_opens_what_save_model_writes(golden, tokenizer, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers")
    config, params = read_huggingface(golden, jnp.float32)
    save_model(tmp_path, config, params, tokenizer, "float32")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.generation_config.eos_token_id in (list(config.eos_token_ids), config.eos_token_ids[0])
    tokens = np.load(golden / "logits.npz")["tokens"]
    with torch.no_grad():
        theirs = model(torch.tensor(tokens, dtype=torch.long)).logits
    np.testing.assert_allclose(forward(config, params, jnp.asarray(tokens)), theirs.numpy(), rtol=0, atol=1e-4)


def test_saving_over_a_folder_keeps_its_other_files(model_folder, tokenizer):
    (model_folder / "README.md").write_text("a model card")
    config, params = read_huggingface(model_folder, jnp.float32)
    params.layers[0] = params.layers[1]
    save_model(model_folder, config, params, tokenizer, jnp.float32)
    assert (model_folder / "README.md").read_text() == "a model card"
    chex.assert_trees_all_equal(read_huggingface(model_folder, jnp.float32)[1], params)


def test_a_failed_save_leaves_the_old_model(model_folder, tokenizer):
    class BrokenTokenizer:
        def save_pretrained(self, folder):
            raise OSError("disk full")

    config, params = read_huggingface(model_folder, jnp.float32)
    before = (model_folder / "model.safetensors").read_bytes()
    params.layers[0] = params.layers[1]
    with pytest.raises(OSError, match="disk full"):
        save_model(model_folder, config, params, BrokenTokenizer(), jnp.float32)
    assert (model_folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in model_folder.parent.iterdir()] == [model_folder.name]


def test_saving_onto_a_file_is_refused(llama31, tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="this is a file"):
        save_model(tmp_path / "file", *read_huggingface(llama31), tokenizer, jnp.float32)


@pytest.mark.core
def test_parts_with_an_index_load_like_one_file(model_folder):
    whole = read_huggingface(model_folder)
    split(model_folder)
    chex.assert_trees_all_equal(read_huggingface(model_folder)[1], whole[1])


def test_a_redundant_head_of_a_tied_model_and_old_rotary_buffers_are_accepted(edit_config):
    folder = edit_config(tie_word_embeddings=True)
    rewrite(folder, lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8)})
    assert read_huggingface(folder)[1].head_EV is None


def test_missing_unexpected_and_misshaped_tensors_are_named_in_one_message(model_folder):
    def damage(tensors):
        del tensors[K_NORM]
        tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((2, 2))
        tensors[Q_PROJ] = tensors[Q_PROJ][:40]
        return tensors

    rewrite(model_folder, damage)
    unexpected = "unexpected tensors (1): model.layers.2.mlp.up_proj.weight in model.safetensors"
    wrong = f"wrong shapes (1): {Q_PROJ} in model.safetensors is [40, 32], not [64, 32]"
    assert_refused(model_folder, f"missing tensors (1): {K_NORM}", unexpected, wrong)


def test_a_long_list_of_missing_tensors_is_cut(edit_config):
    folder = edit_config(num_hidden_layers=4)
    assert_refused(folder, "missing tensors (22): model.layers.2.", ", ...")


def test_a_missing_head_of_an_untied_model_is_named(model_folder):
    rewrite(model_folder, lambda tensors: {name: x for name, x in tensors.items() if name != "lm_head.weight"})
    assert_refused(model_folder, "missing tensors (1): lm_head.weight")


def test_integer_weights_are_refused(model_folder):
    rewrite(model_folder, lambda tensors: tensors | {K_NORM: tensors[K_NORM].astype(np.int8)})
    assert_refused(model_folder, K_NORM, "I8", "model.safetensors")


@pytest.mark.core
@pytest.mark.parametrize("size", [0, 5, 200, 90_000])
def test_a_truncated_file_is_named(model_folder, size):
    file = model_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert_refused(model_folder, "model.safetensors: not a complete safetensors file")


def test_a_missing_part_is_named_with_a_tensor_it_should_hold(model_folder):
    split(model_folder)
    part = model_folder / "model-00002-of-00002.safetensors"
    part.unlink()
    assert_refused(model_folder, f"{part} is missing", ".weight")


def test_an_index_without_a_map_is_named(model_folder):
    shutil.move(model_folder / "model.safetensors", model_folder / "weights")
    (model_folder / "model.safetensors.index.json").write_text("{}")
    assert_refused(model_folder, "model.safetensors.index.json", "'weight_map'")


def test_a_folder_without_weights_or_configuration_says_which_file_is_missing(model_folder):
    (model_folder / "model.safetensors").unlink()
    assert_refused(model_folder, "neither model.safetensors nor model.safetensors.index.json")
    (model_folder / "config.json").unlink()
    assert_refused(model_folder, "config.json is missing")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_is_named(model_folder, content):
    (model_folder / "config.json").write_text(content)
    assert_refused(model_folder, "config.json")
