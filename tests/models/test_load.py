import hashlib

import jax.numpy as jnp
import pytest

from kvpop_jax.errors import UserError
from kvpop_jax.models import fingerprint, load_model, load_tokenizer


@pytest.fixture
def folder(model_folder, tokenizer):
    tokenizer.save_pretrained(model_folder)
    return model_folder


@pytest.mark.core
def test_a_folder_gives_everything_a_run_needs(folder):
    model = load_model(str(folder))
    assert model.source == str(folder)
    assert model.config.eos_token_ids == (2,)
    assert model.params.embedding_VE.dtype == jnp.float32  # the default on a CPU
    assert model.tokenizer("w7 w8")["input_ids"] == [7, 8]
    assert model.fingerprint == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_fingerprint_reads_files_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b").write_bytes(b"second")
    (tmp_path / "a").write_bytes(b"first")
    assert fingerprint([tmp_path / "b", tmp_path / "a"]) == hashlib.sha256(b"firstsecond").hexdigest()


def test_one_changed_weight_changes_the_fingerprint(folder):
    before = load_model(str(folder)).fingerprint
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert load_model(str(folder)).fingerprint != before


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("no/such/folder", "no such folder, .gguf file, or Hugging Face model id"),
        ("nowhere.gguf", "nowhere.gguf: no such file"),
    ],
)
def test_a_source_that_is_not_there_is_named(source, named):
    with pytest.raises(UserError, match=named):
        load_model(source)


def test_a_hub_id_that_cannot_be_fetched_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="nobody/nothing: no such folder, and the Hugging Face hub cannot be reached"):
        load_model("nobody/nothing")


def test_a_file_of_another_kind_is_named(tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed")
    (tmp_path / "weights.bin").write_bytes(b"some other bytes")
    with pytest.raises(UserError, match=r"weights\.bin: not a complete GGUF file"):
        load_model(str(tmp_path / "weights.bin"))


def test_a_folder_without_a_tokenizer_is_named(model_folder):
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_model(str(model_folder))


def test_a_broken_tokenizer_is_named(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="the tokenizer cannot be read"):
        load_tokenizer(folder)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(folder, tokenizer):
    tokenizer.add_tokens(["w64"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="65 tokens, the model only 64"):
        load_model(str(folder))


@pytest.mark.parametrize("dtype", ["int8", "float7"])
def test_an_unknown_dtype_is_named(folder, dtype):
    with pytest.raises(UserError, match=dtype):
        load_model(str(folder), dtype)
