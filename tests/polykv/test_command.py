"""calibrate.py from options to plan, on a model of one layer; what cannot be done is refused before any work."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from kvpop_jax.errors import UserError
from kvpop_jax.models import ModelConfig, init_params, load_tokenizer, save_model
from kvpop_jax.polykv import read_plan
from kvpop_jax.polykv.command import main

pytestmark = pytest.mark.literal

TINY_MATH = Path(__file__).parents[2] / "assets" / "qwen3-tiny-math"
SIZES = [
    "--budget",
    "16",
    "--window",
    "4",
    "--sinks",
    "2",
    "--prompt_tokens",
    "40",
    "--continuation_tokens",
    "8",
    "--sequences",
    "2",
    "--batch_size",
    "2",
]
PATTERNS = ["--prefill", "dense,tova", "--decode", "tova,streaming_llm"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = load_tokenizer(TINY_MATH)
    config = ModelConfig(
        family="qwen3", vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tie_embeddings=True,
        qk_norm=True, max_position=64, bos_token_id=None, eos_token_ids=(tokenizer.eos_token_id,), pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("polykv") / "model"
    save_model(folder, config, init_params(config, jax.random.key(0), jnp.float32), tokenizer, jnp.float32)
    return str(folder)


@pytest.fixture(scope="module")
def plan(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "mine.yaml"
    assert main(["--model", model, "--output", str(path), *SIZES, *PATTERNS]) == 0
    return path


def test_a_plan_holds_every_signal_and_has_its_picture_beside_it(plan):
    found = read_plan(plan)
    assert found.signals["cosine"].keys() == found.signals["ppl"].keys() == {"prefill", "decode"}
    assert found.signals["cosine"]["decode"].keys() == {"tova", "streaming_llm"}
    # A full prompt changes nothing, so by either signal no policy beats it.
    assert found.layers[0].prefill == "dense" and found.layers[0].decode in ("tova", "streaming_llm")
    assert (found.budget, found.layers[0].budget, found.sinks, found.window) == (16, 16, 2, 4)
    assert len(found.data["sha256"]) == 64 and plan.with_suffix(".png").exists()


def test_measured_signals_are_reused_for_another_choice(model, plan):
    other = plan.with_name("other.yaml")
    reuse = ["--reuse", str(plan), "--output", str(other), "--prefill", "tova", "--decode", "streaming_llm"]
    assert main(["--model", model, *SIZES, *reuse]) == 0
    found = read_plan(other)
    assert (found.layers[0].prefill, found.layers[0].decode) == ("tova", "streaming_llm")
    assert found.chosen_by["prefill"] == "given" and found.signals == read_plan(plan).signals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--prefill nope", "unknown policy 'nope'"),
        ("--decode dense", "dense keeps everything"),
        ("--decode kvpop", "needs a trained scorer"),
        ("--budget 48", "nothing would be evicted"),
        ("--sinks -1", "sinks must not be negative, as -1 is"),
        ("--window 0", "window must be at least 1, not 0"),
        ("--least 17", "least must be between 1 and the budget 16, not 17"),
        ("--budget 5 --prefill streaming_llm", "budget 5 leaves no pool"),
        ("--prompt_tokens 60", "the model's limit is 64"),
        ("--output /no/such/folder/plan.yaml", "no folder /no/such/folder"),
        ("--output plan.png", "plan.png must end in .yaml"),
        ("--reuse PLAN --budget 17", "was measured at budget 16, not 17"),
        ("--reuse PLAN --window 5", "was measured with window 4, not 5"),
        ("--paths nothing.jsonl", "nothing.jsonl"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(model, plan, tmp_path, options, words):
    output = str(tmp_path / "p.yaml")
    options = options.replace("PLAN", str(plan)).split()
    with pytest.raises(UserError, match=words):
        main(["--model", model, "--output", output, *SIZES, *PATTERNS, *options])
    assert not Path(output).exists()
