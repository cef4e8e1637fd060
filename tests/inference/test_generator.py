"""`Generator`: what a completion may depend on, where it ends, and what is refused."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from inference.tiny_model import CONFIG, distinct_tokens, make_policy, random_scorer, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from kvpop_jax.errors import UserError
from kvpop_jax.inference import Completion, Generator, SamplingParams
from kvpop_jax.inference import generator as generator_module
from kvpop_jax.scorers import MLPSettings, dims_of, mlp_scorer
from kvpop_jax.scorers.files import save_scorer

BUDGET, NEW_TOKENS = 30, 40
# The first two prompts alone are padded less than beside the third, which is longer than the budget too.
PROMPTS = [distinct_tokens(1, 64)[0][:3].tolist(), distinct_tokens(2, 64)[1][:10].tolist()]
PROMPTS.append([*distinct_tokens(3, 64)[2].tolist(), *PROMPTS[1][:6]])
SEEDS = [5, 6, 7]
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_new_tokens=NEW_TOKENS, stop_tokens=(11, 12))


@cache
def words_tokenizer() -> PreTrainedTokenizerFast:
    """Every `wN` is token N; a message stands between `w1` and `w2`."""
    model = Tokenizer(WordLevel({f"w{index}": index for index in range(CONFIG.vocab_size)}, unk_token="w0"))
    model.pre_tokenizer = Whitespace()
    template = "{% for turn in messages %}w1 {{ turn.content }} w2 {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="w0", chat_template=template)


@cache
def generator(name: str) -> Generator:
    scorers = [random_scorer(name, layer) for layer in range(CONFIG.num_layers)]
    model = replace(tiny_model(), tokenizer=words_tokenizer())
    return Generator(model, make_policy(name), None if name == "dense" else BUDGET, scorers)


def assert_same(got: Completion, wanted: Completion):
    assert (got.tokens, got.finish_reason) == (wanted.tokens, wanted.finish_reason)
    np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-4)
    assert got.cache.peak_live == wanted.cache.peak_live
    assert got.cache.prompt_survival == pytest.approx(wanted.cache.prompt_survival)


@pytest.mark.parametrize(("name", "sampling"), [("tova", SAMPLED)])
def test_a_completion_depends_on_its_prompt_and_seed_only(name, sampling):
    batch = generator(name).generate(PROMPTS, sampling, SEEDS)
    order = [2, 0, 1]
    other_seeds = [9, 6, 8]
    shuffled = generator(name).generate([PROMPTS[i] for i in order], sampling, [SEEDS[i] for i in order])
    reseeded = generator(name).generate(PROMPTS, sampling, other_seeds)
    alone = generator(name).generate(PROMPTS[1:2], sampling, SEEDS[1:2])
    for wanted, got in zip([batch[i] for i in order], shuffled, strict=True):
        assert_same(got, wanted)
    assert_same(reseeded[1], batch[1])
    assert_same(alone[0], batch[1])
    assert (reseeded[0].tokens == batch[0].tokens) == (sampling.temperature == 0)
    for completion in batch:
        ended = completion.finish_reason == "stop"
        assert len(completion.logprobs) == len(completion.tokens)
        assert len(completion.tokens) < NEW_TOKENS if ended else len(completion.tokens) == NEW_TOKENS
        assert not set(completion.tokens) & set(sampling.stop_tokens)
    if sampling.stop_tokens:
        assert any(completion.finish_reason == "stop" for completion in batch)


def test_streaming_yields_the_tokens_and_the_text_of_a_completion():
    wanted = generator("tova").generate(PROMPTS[1:2], GREEDY, SEEDS[1:2])[0]
    assert list(generator("tova").stream_tokens(PROMPTS[1], GREEDY, SEEDS[1])) == wanted.tokens
    assert "".join(generator("tova").stream(PROMPTS[1], GREEDY, SEEDS[1])) == wanted.text
    assert wanted.text == " ".join(f"w{token}" for token in wanted.tokens)
    assert len(set(wanted.tokens)) > 5


def test_a_message_and_a_chat_are_completed_as_the_tokens_that_the_template_makes_of_them():
    system, user = {"role": "system", "content": "w3"}, {"role": "user", "content": "w4 w5"}
    tokens = [[1, 4, 5, 2], [1, 3, 2, 1, 4, 5, 2], [4, 5]]
    assert generator("tova").encode(["w4 w5", [system, user], [4, 5]]) == tokens
    of_words, of_tokens = (generator("tova").generate([prompt], GREEDY)[0] for prompt in ("w4 w5", tokens[0]))
    assert of_words == of_tokens


def test_a_stop_token_ends_a_completion_and_its_report_but_changes_nothing_before(monkeypatch):
    endless = generator("tova").generate(PROMPTS[1:2], GREEDY, SEEDS[1:2])[0]
    end = next(n for n in range(2, BUDGET // 2) if endless.tokens[n] not in endless.tokens[:n])
    stop = endless.tokens[end]
    model = replace(tiny_model(), config=replace(CONFIG, eos_token_ids=(stop,)))
    stopping = replace(generator("tova"), model=model)
    stopped = stopping.generate(PROMPTS[1:2], GREEDY, SEEDS[1:2])[0]
    assert (stopped.tokens, stopped.finish_reason) == (endless.tokens[:end], "stop")
    assert (endless.finish_reason, endless.cache.peak_live) == ("length", BUDGET)
    # The prompt and the tokens before the stop token were all there is: the steps that ran on are not reported.
    assert (stopped.cache.peak_live, stopped.cache.prompt_survival) == (len(PROMPTS[1]) + end, 1.0)
    # Sampled by the last step of a dispatch, and not fed any more.
    monkeypatch.setattr(generator_module, "STEPS_PER_DISPATCH", end)
    assert stopping.generate(PROMPTS[1:2], GREEDY, SEEDS[1:2])[0] == stopped


def test_a_generator_from_files_has_the_policy_the_sizes_and_the_scorer_it_was_asked_for(tmp_path):
    source = str(Path(__file__).parents[2] / "assets" / "qwen3-tiny-math")
    bounded = Generator.from_pretrained(source, policy="streaming_llm", budget=64, window=8)
    (plan,) = set(bounded.plans(0))
    assert (bounded.policies[0].name, plan.sinks, plan.window, plan.pool) == ("streaming_llm", 4, 8, 52)
    assert Generator.from_pretrained(source).policies[0].name == "dense"

    settings, config = MLPSettings(width=4), bounded.model.config
    scorer = mlp_scorer(settings, dims_of(config))
    params = [scorer.init(jax.random.key(layer)) for layer in range(config.num_layers)]
    trained = {"policy": "kvpop_mlp", "sinks": 2, "window": 6, "budgets": {48: 40}, "pin_prompt": False}
    save_scorer(tmp_path, bounded.model, scorer, settings, params, **trained)
    learned = Generator.from_pretrained(source, scorer=str(tmp_path), budget=48)
    (plan,) = set(learned.plans(0))
    assert (learned.policies[0].name, plan.sinks, plan.window) == ("kvpop_mlp", 2, 6)
    chex.assert_trees_all_equal(learned.scorers, params)
    both = Generator.from_pretrained(source, scorer=str(tmp_path), policy="snapkv+kvpop_mlp", budget=48)
    chex.assert_trees_all_equal(both.scorers, [(None, own) for own in params])
    with pytest.raises(UserError, match="trained for budgets 48, not 64"):
        Generator.from_pretrained(source, scorer=str(tmp_path), budget=64)


@pytest.mark.core
def test_the_prompts_and_budgets_that_cannot_work_are_refused_by_their_numbers():
    dense = generator("dense")
    with pytest.raises(UserError, match="prompt 1 is empty"):
        dense.generate([[1], []], GREEDY)
    with pytest.raises(UserError, match=r"prompt 1 has 217 tokens and max_new_tokens is 40: .* limit of 256"):
        dense.generate([[1], [1] * 217], GREEDY)
    with pytest.raises(UserError, match="prompt 0 is empty"):
        next(dense.stream([], GREEDY))
    with pytest.raises(UserError, match="prompts is one string; give a list of them"):
        dense.generate("w3 w4", GREEDY)
    wordless = Generator(tiny_model(), make_policy("dense"), None)
    for refused in (lambda: wordless.generate(["w3"], GREEDY), lambda: next(wordless.stream([3], GREEDY))):
        with pytest.raises(UserError, match="model tiny has no tokenizer"):
            refused()
    with pytest.raises(UserError, match="prompt 1 has token 64; the model's tokens are 0 to 63"):
        dense.generate([[1], [2, 64, 3]], GREEDY)
    for not_tokens, first in ((["text"], "'text'"), ([1.5, 2.0], "1.5")):
        with pytest.raises(UserError, match=f"prompt 0 begins with {first}; give a message"):
            dense.generate([not_tokens], GREEDY)
    with pytest.raises(UserError, match="stop_tokens must be token ids, not '</s>'"):
        SamplingParams(stop_tokens=("</s>",))
    for refused in (dense.generate, dense.stream):
        with pytest.raises(UserError, match="stop_tokens has 64; the model's tokens are 0 to 63"):
            list(refused([[1]] if refused == dense.generate else [1], SamplingParams(stop_tokens=(2, 64))))
    with pytest.raises(UserError, match="budget 7 leaves no pool for policy streaming_llm"):
        Generator(tiny_model(), make_policy("streaming_llm"), budget=7)
    pinned = Generator(tiny_model(), make_policy("streaming_llm"), BUDGET, pin_prompt=True)
    with pytest.raises(UserError, match="pin_prompt: a prompt of 25 tokens leaves no pool in a budget of 30"):
        pinned.generate([[1], [1] * 25], GREEDY)


@pytest.mark.core
def test_no_prompts_give_no_completions():
    assert generator("dense").generate([], GREEDY) == []


def test_seeds_that_are_not_one_per_prompt_are_refused():
    with pytest.raises(UserError, match="2 seeds for 3 prompts"):
        generator("tova").generate(PROMPTS, GREEDY, SEEDS[:2])


@pytest.mark.parametrize("prompt_length", [0, 10, 11])
def test_a_prompt_that_leaves_nothing_to_read_is_refused(prompt_length):
    with pytest.raises(UserError, match=f"prompt_length is {prompt_length}"):
        next(generator("tova").teacher_forced(np.ones((1, 10), int), prompt_length))


def test_printing_a_generator_does_not_fetch_the_weights():
    assert "array" not in repr(generator("dense")).lower()
