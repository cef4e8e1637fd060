"""A folder in the form of Llama-3.1-8B-Instruct goes through everything: template, rope scaling, stop tokens."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvpop_jax import policies
from kvpop_jax.evaluation.command import main
from kvpop_jax.evaluation.records import read_rollouts
from kvpop_jax.inference import Generator, SamplingParams
from kvpop_jax.models import LoadedModel, ModelConfig, encode_prompt, init_params, load_model
from kvpop_jax.models.config import RopeScaling
from kvpop_jax.models.huggingface import save_model
from kvpop_jax.policies import PolicySettings
from kvpop_jax.training.documents import encode
from kvpop_jax.training.sources import Row

SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
)  # fmt: skip
# The turns of Meta's template, without its tools: the system turn with the dates is always there.
TEMPLATE = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
ASKED = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nfind 1 234<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
# Llama 3.1's own, but for the sizes.
SCALING = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip


def llama_tokenizer():
    """Byte-level BPE that splits numbers in threes and puts the start token first, as Llama 3's does."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    number = r"\p{N}{1,3}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(number), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["The grass is green. The sky is blue. The sun is yellow. Here we go."], trainer)
    start = SPECIAL[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, tokenizer.token_to_id(start))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=start, eos_token="<|eot_id|>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """config.json and generation_config.json as Meta's folder has them: rope_scaling, and three ids that end a turn."""
    folder = tmp_path_factory.mktemp("llama") / "model"
    tokenizer = llama_tokenizer()
    ends = tuple(tokenizer.convert_tokens_to_ids(["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]))
    config = ModelConfig(
        family="llama", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=1, head_dim=8, rms_norm_eps=1e-5, rope_theta=500000.0, rope_scaling=None, tie_embeddings=False,
        qk_norm=False, max_position=131072, bos_token_id=tokenizer.bos_token_id, eos_token_ids=ends[:1],
        pad_token_id=None,
    )  # fmt: skip
    params = jax.tree.map(
        lambda leaf: leaf * 8 if leaf.ndim >= 2 else leaf, init_params(config, jax.random.key(3), jnp.float32)
    )
    save_model(folder, config, params, tokenizer, jnp.float32)
    for name, changes in {
        "config.json": {"rope_scaling": SCALING, "eos_token_id": list(ends)},
        "generation_config.json": {"eos_token_id": list(ends), "do_sample": True, "temperature": 0.6, "top_p": 0.9},
    }.items():
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))
    return folder


@pytest.fixture(scope="module")
def model(folder) -> LoadedModel:
    return load_model(str(folder))


def test_the_folder_s_rope_scaling_and_all_of_its_stop_tokens_are_read(model):
    assert model.config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    assert model.tokenizer.convert_ids_to_tokens(model.config.eos_token_ids) == [
        "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>",
    ]  # fmt: skip


def test_a_prompt_is_the_template_s_text_with_one_start_token(model):
    tokens = encode_prompt(model.tokenizer, "find 1 234 ")
    assert model.tokenizer.decode(tokens) == ASKED
    assert tokens.count(model.tokenizer.bos_token_id) == 1
    opened = encode_prompt(model.tokenizer, "find 1 234", " It is", "brief")
    assert model.tokenizer.decode(opened) == f"{ASKED} It is"
    plain = encode_prompt(model.tokenizer, "find 1 234", style="plain")
    assert model.tokenizer.decode(plain) == "<|begin_of_text|>find 1 234"


def test_a_training_document_splits_where_evaluation_starts_to_generate(model):
    chat = ({"role": "user", "content": "find 1 234"}, {"role": "assistant", "content": "yes"})
    prompt, response = encode(model.tokenizer, Row("here", chat))
    assert prompt == encode_prompt(model.tokenizer, "find 1 234")
    assert model.tokenizer.decode(response) == "yes<|eot_id|>"


def test_every_stop_token_ends_a_completion(model):
    prompts = [encode_prompt(model.tokenizer, message) for message in ("find 1 234", "the sky", "blue? Here we go")]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=16)
    dense = policies.make("dense", PolicySettings())
    endless = replace(model, config=replace(model.config, eos_token_ids=()))
    free = [completion.tokens for completion in Generator(endless, dense, None).generate(prompts, sampling)]
    ends = model.config.eos_token_ids
    assert not set(ends) & {token for tokens in free for token in tokens}
    # With columns of the head exchanged, a stop token comes where another one came, a different one in every row.
    order = list(range(model.config.vocab_size))
    expected = []
    for row, end in enumerate(ends):
        others = {token for tokens in free[:row] + free[row + 1 :] for token in tokens}
        place = next(place for place in range(15, 0, -1) if free[row][place] not in others | {*free[row][:place]})
        order[end], order[free[row][place]] = free[row][place], end
        expected.append((free[row][:place], "stop"))
    params = replace(model.params, head_EV=model.params.head_EV[:, jnp.array(order)])
    stopped = Generator(replace(model, params=params), dense, None).generate(prompts, sampling)
    assert [(completion.tokens, completion.finish_reason) for completion in stopped] == expected


def test_an_evaluation_runs_from_the_command_line(folder, tmp_path, capsys):
    arguments = {
        "model": folder, "tasks": "ruler_niah_single_1", "lengths": 640, "problems": 1, "max_new_tokens": 4,
        "policies": "streaming_llm", "budgets": 128, "output": tmp_path,
    }  # fmt: skip
    assert main([f"--{name}={value}" for name, value in arguments.items()]) == 0
    assert "string_match_all" in capsys.readouterr().out
    (rollout,) = read_rollouts(tmp_path / "rollouts.jsonl").values()
    assert 590 < rollout.prompt_tokens <= 636
