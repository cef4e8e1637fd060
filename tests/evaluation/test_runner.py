"""A whole evaluation of a random model: what it writes, that it resumes, that it survives Ctrl-C."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation import generation, reading, runner, tasks
from kvpop_jax.evaluation.contestants import contestants_of
from kvpop_jax.evaluation.records import read_rollouts
from kvpop_jax.evaluation.runner import run_evaluation
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.models import LoadedModel, ModelConfig, init_params, load_tokenizer

ROOT = Path(__file__).parents[2]
BUDGET = 32


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    tokenizer = load_tokenizer(ROOT / "assets" / "qwen3-tiny-math")
    config = ModelConfig(
        family="qwen3",
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        tie_embeddings=True,
        qk_norm=True,
        max_position=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
    )
    params = init_params(config, jax.random.key(0), jnp.float32)
    return LoadedModel(config, params, tokenizer, source="random", fingerprint="f" * 64)


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> EvalSettings:
    text = tmp_path_factory.mktemp("text") / "work.txt"
    text.write_text("u 2 + 8 + 0 = 0 carry 1 abel = 4 7 2 work find keep three digits " * 500)
    return EvalSettings(
        policies=("streaming_llm", "dense"),
        budgets=(BUDGET,),
        tasks=("tiny_math", "lm"),
        problems=4,
        rollouts=2,
        temperature=0.0,
        problem_tokens=(450, 480),
        max_new_tokens=5,
        batch_size=8,
        window=8,
        text=str(text),
        lengths=(64,),
    )


@pytest.fixture(scope="module")
def output(model, settings, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    run_evaluation(model, settings, {}, folder, progress=False)
    return folder


@pytest.mark.core
def test_results_hold_a_row_per_policy_budget_and_metric(output):
    results = json.loads((output / "results.json").read_text())
    assert results["schema_version"] == 1 and results["complete"]
    assert results["model"] == {"source": "random", "fingerprint": "f" * 64}
    assert results["versions"].keys() >= {"jax", "kvpop_jax", "python"}
    found = {(row["task"], row["policy"], row["budget"], row["metric"]) for row in results["rows"] if not row["group"]}
    contestants = (("dense", None), ("streaming_llm", BUDGET))
    metrics = (("tiny_math", "pass@1"), ("lm", "nll"), ("lm", "agreement"), ("lm", "kl"))
    assert found == {(task, *contestant, metric) for task, metric in metrics for contestant in contestants}


def test_a_corrected_answer_is_graded_again(model, settings, tmp_path):
    asked = dataclasses.replace(settings, policies=("dense",), tasks=("aime25",), data_dir=str(tmp_path), rollouts=1)
    contestants = contestants_of(model, asked, {})
    keys = set()
    for answer in ("12", "21", "12"):
        (tmp_path / "aime25.jsonl").write_text(json.dumps({"id": 1, "problem": "1 + 2 =", "answer": answer}) + "\n")
        (job,) = generation.plan(tasks.get("aime25"), model, contestants, asked)
        keys.add(job.key)
    assert len(keys) == 2


@pytest.mark.core
def test_costs_are_those_of_the_bounded_cache(output):
    rows = json.loads((output / "results.json").read_text())["rows"]
    for row in rows:
        assert row["pin_prompt"] is False
        if row["policy"] == "streaming_llm":
            assert row["peak_live"] == row["allocated"] == BUDGET
            assert sum(row[part] for part in ("sinks", "window", "pool", "state_entries")) == BUDGET
            assert row["compression"] == pytest.approx(1 - BUDGET / row["context"])
            assert 0 < row["prompt_survival"] < 0.7
        else:
            assert (row["compression"], row["prompt_survival"]) == (0.0, 1.0)
        assert row["tokens"] > 0 and row["seconds"] > 0 and row["cache_bytes"] > 0


def test_rollouts_record_problem_text_seed_and_grade(output, settings):
    rollouts = [r for r in read_rollouts(output / "rollouts.jsonl").values() if r.task == "tiny_math"]
    assert len(rollouts) == 2 * settings.problems * settings.rollouts
    by_policy = {
        policy: {(r.problem, r.rollout): r.seed for r in rollouts if r.policy == policy} for policy in settings.policies
    }
    assert by_policy["dense"] == by_policy["streaming_llm"]
    assert len(set(by_policy["dense"].values())) == len(by_policy["dense"])
    for rollout in rollouts:
        assert rollout.prompt and rollout.prompt_tokens > BUDGET
        assert set(rollout.grade) == {"pass@1"}
        assert rollout.tokens <= 5
        assert rollout.finish_reason == "length" or rollout.tokens < 5


@pytest.mark.core
def test_the_dense_reading_is_the_models_own_likelihood(output, model, settings):
    from kvpop_jax.models import forward

    windows = {window.id: window for window in tasks.get("lm").windows(settings, model.tokenizer)}
    for rollout in read_rollouts(output / "rollouts.jsonl").values():
        if (rollout.task, rollout.policy) != ("lm", "dense"):
            continue
        window = windows[rollout.problem]
        tokens = jnp.array([window.tokens])
        log_p_TV = jax.nn.log_softmax(forward(model.config, model.params, tokens)[0])
        nll_T = -log_p_TV[jnp.arange(len(window.tokens) - 1), tokens[0, 1:]]
        assert rollout.grade["nll"] == pytest.approx(float(nll_T[window.prefix - 1 :].mean()), abs=1e-4)
        assert rollout.grade["agreement"] == 1.0
        assert rollout.grade["kl"] == pytest.approx(0.0, abs=1e-6)


def test_comparing_known_distributions_gives_their_divergence():
    p, q = jnp.array([[0.5, 0.25, 0.25]]), jnp.array([[0.25, 0.5, 0.25]])
    nll, agreement, kl = reading.compare(jnp.log(p) + 3.0, jnp.log(q), jnp.array([1]))[0]
    assert nll == pytest.approx(float(-jnp.log(0.5)), abs=1e-6)
    assert agreement == 0.0
    assert kl == pytest.approx(float(jnp.sum(p * jnp.log(p / q))), abs=1e-6)


def test_an_interrupted_evaluation_keeps_what_is_finished_and_goes_on_without_repeating_it(
    output, model, settings, tmp_path, monkeypatch
):
    only = dataclasses.replace(settings, tasks=("lm",), policies=("dense",), batch_size=2)
    path = tmp_path / "rollouts.jsonl"
    append = runner.append_rollouts

    def interrupted(path, rollouts):
        append(path, rollouts)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "append_rollouts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_evaluation(model, only, {}, tmp_path, progress=False)
    first = path.read_text()
    assert len(first.splitlines()) == 2
    results = json.loads((tmp_path / "results.json").read_text())
    assert not results["complete"] and {row["n"] for row in results["rows"]} == {2}
    assert "Incomplete" in (tmp_path / "report.md").read_text()

    run_evaluation(model, only, {}, tmp_path, progress=False)
    assert path.read_text().startswith(first)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["complete"] and {row["n"] for row in results["rows"]} == {4}
    # The keys do not depend on the batch size nor on the other policies, and neither do the results.
    at_once, in_parts = read_rollouts(output / "rollouts.jsonl"), read_rollouts(path)
    assert len(in_parts) == 4
    for key, rollout in in_parts.items():
        assert rollout.grade == pytest.approx(at_once[key].grade, abs=1e-5)


def test_interrupted_generation_keeps_every_finished_rollout_and_goes_on_with_the_same_answers(
    output, model, settings, tmp_path, monkeypatch
):
    only = dataclasses.replace(settings, tasks=("tiny_math",), policies=("streaming_llm",), batch_size=3)
    path = tmp_path / "rollouts.jsonl"
    append = runner.append_rollouts

    def interrupted(path, rollouts):
        append(path, rollouts)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "append_rollouts", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_evaluation(model, only, {}, tmp_path, progress=False)
    first = path.read_text()
    assert len(first.splitlines()) == 1  # not a whole batch

    run_evaluation(model, only, {}, tmp_path, progress=False)
    assert path.read_text().startswith(first)
    at_once, in_parts = read_rollouts(output / "rollouts.jsonl"), read_rollouts(path)
    assert len(in_parts) == 8
    assert all(rollout.text == at_once[key].text for key, rollout in in_parts.items())
    (batch,) = json.loads((tmp_path / "results.json").read_text())["batches"]
    assert (batch["task"], batch["contestant"]) == ("tiny_math", f"streaming_llm {BUDGET}")
    assert (batch["requests"], batch["rows"]) == (7, 3)
    finished_now = [rollout for rollout in in_parts.values() if json.dumps(rollout.key) not in first]
    assert batch["tokens"] == sum(rollout.tokens for rollout in finished_now)
    # Seven in threes are three dispatches, most of whose steps come after the fifth and last token.
    assert batch["occupancy"] == pytest.approx(batch["tokens"] / (3 * 3 * 32))


def test_what_was_computed_in_another_type_is_another_rollout(model, settings):
    task = tasks.get("tiny_math")
    keys = []
    for dtype in (jnp.float32, jnp.bfloat16):
        cast = dataclasses.replace(model, params=jax.tree.map(lambda x, to=dtype: x.astype(to), model.params))
        jobs = generation.plan(task, cast, contestants_of(cast, settings, {}), settings)
        keys.append({job.key for job in jobs})
    assert not keys[0] & keys[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ("dense", "nonesuch")}, "unknown policy 'nonesuch'"),
        ({"policies": ("kvpop",)}, "kvpop needs a trained scorer"),
        ({"budgets": (12,)}, "budget 12 leaves no pool"),
        ({"tasks": ("nonesuch",)}, "unknown task 'nonesuch'"),
        ({"max_new_tokens": 2000}, "set --max_new_tokens to at most"),
        ({"lengths": (2048,)}, "model's limit is 1024"),
        ({"pin_prompt": True}, "tiny_math, streaming_llm 32: pin_prompt"),
    ],
)
def test_what_cannot_work_is_refused_before_any_rollout(model, settings, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        run_evaluation(model, dataclasses.replace(settings, **changes), {}, tmp_path, progress=False)
    assert not (tmp_path / "rollouts.jsonl").exists()
