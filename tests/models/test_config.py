import json

import pytest

from kvpop_jax.errors import UserError
from kvpop_jax.models import ModelConfig, RopeScaling

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(**changes) -> dict:
    config = QWEN3 | {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 20, "num_key_value_heads": 4}
    return {name: value for name, value in (config | changes).items() if value is not None}


@pytest.mark.core
def test_qwen3_4b_fields():
    config = ModelConfig.from_hf(QWEN3)
    assert (config.family, config.qk_norm, config.tie_embeddings) == ("qwen3", True, True)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers) == (32, 8, 128, 36)
    assert config.head_dim != config.hidden_size // config.num_heads
    assert config.rope_theta == 1e6 and config.rope_scaling is None
    assert config.eos_token_ids == (151645,)


def test_llama_derives_an_absent_head_dim():
    assert ModelConfig.from_hf(llama(head_dim=None)).head_dim == 2560 // 20


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    ],
    ids=["transformers_4", "transformers_5"],
)
def test_llama31_scaling_in_both_spellings(fields):
    config = ModelConfig.from_hf(llama(**fields))
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert not config.qk_norm


def test_generation_config_decides_what_ends_a_generation():
    assert ModelConfig.from_hf(QWEN3, {"eos_token_id": [151645, 151643]}).eos_token_ids == (151645, 151643)
    assert ModelConfig.from_hf(QWEN3, {"temperature": 0.6}).eos_token_ids == (151645,)
    assert ModelConfig.from_hf(QWEN3 | {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.core
@pytest.mark.parametrize("source", [QWEN3, llama(rope_scaling=LLAMA3, eos_token_id=[1, 2], tie_word_embeddings=False)])
def test_to_hf_and_back(source):
    config = ModelConfig.from_hf(source)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("source", [QWEN3, llama(rope_scaling=LLAMA3, eos_token_id=[1, 2])])
def test_transformers_reads_the_same_from_to_hf(source):
    transformers = pytest.importorskip("transformers")
    config = ModelConfig.from_hf(source)
    theirs = transformers.AutoConfig.for_model(**config.to_hf("bfloat16"))
    assert ModelConfig.from_hf(json.loads(theirs.to_json_string())) == config
    assert str(theirs.to_dict()["dtype"]) == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_theta": None}, "'rope_theta' is missing"),
        ({"architectures": ["MistralForCausalLM"]}, "'MistralForCausalLM'; supported are Qwen3ForCausalLM"),
        ({"architectures": None}, "'architectures' names None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'rope_type' is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "'rope_type' is 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor' is missing"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor'"),
        ({"attention_bias": True}, "'attention_bias' is True"),
        ({"use_sliding_window": True}, "'use_sliding_window' is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types' has ['sliding_attention']"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'quantization_config'"),
        ({"hidden_size": "2560"}, "'hidden_size' must be a positive integer, not '2560'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be a positive integer, not 0"),
        ({"rms_norm_eps": None}, "'rms_norm_eps' is missing"),
        ({"head_dim": None}, "'head_dim' is missing"),
        ({"head_dim": 127}, "head_dim 127 is odd"),
        ({"num_key_value_heads": 5}, "num_heads 32 is not a multiple of num_kv_heads 5"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(changes, named):
    config = {name: value for name, value in (QWEN3 | changes).items() if value is not None}
    with pytest.raises(UserError) as error:
        ModelConfig.from_hf(config, where="folder/config.json")
    assert named in str(error.value)
    assert "folder/config.json" in str(error.value)
    assert "\n" not in str(error.value)
