"""Setting up distillation: a student under an eviction policy, its scorer, and the pools its budgets leave."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvpop_jax import policies, sharding
from kvpop_jax.cache import CachePlan, entry_bytes
from kvpop_jax.config import TrainConfig
from kvpop_jax.errors import UserError
from kvpop_jax.models import DecoderParams, LoadedModel, ModelConfig, fingerprint, load_model
from kvpop_jax.policies import Policy, PolicySettings
from kvpop_jax.scorers import Scorer, dims_of
from kvpop_jax.scorers.files import ScorerSettings, load_scorer, make_scorer, save_scorer
from kvpop_jax.training import distill
from kvpop_jax.training.scan import stack_layers
from kvpop_jax.training.setup import Setup, compute_dtype, export_model, make_optimizers, open_data
from kvpop_jax.training.sources import open_source
from kvpop_jax.training.step import Groups
from kvpop_jax.training.student import Student


def prepare_distill(config: TrainConfig, mesh: Mesh) -> Setup:
    """The configured model under the configured policy; its weights, its scorer, or both are trained.

    Raises:
        UserError: a model or data file that cannot be used, a policy without an expiry form, a budget without a pool,
            a size that the mesh does not divide, or nothing to train.
    """
    source = open_source(config.data, config.seed)  # a bad file is found before a model is loaded
    dtype = compute_dtype(config)
    # Weights that are trained start from float32; frozen ones are only ever held in the type they compute in.
    model = load_model(str(config.model.source), dtype if config.freeze_base else jnp.float32, mesh)
    student, plans = configured_student(config, model.config, dtype)
    weights = _starting_weights(config, model, student.scorer, mesh)
    if config.freeze_base:
        objective = distill.train_scorer(model.config, student, remat=config.remat)
        measure = distill.distance(model.config, student)
    else:
        objective = distill.distill(model.config, student, dtype, remat=config.remat)
        measure = None
    # A copy, because the first step takes over the trained weights' buffers.
    frozen = sharding.make_on(mesh, partial(_stacked, dtype=dtype), model.params)
    return Setup(
        weights=weights,
        frozen=frozen,
        objective=objective,
        measure=measure,
        optimizers=make_optimizers(config, tuple(weights)),
        pools=tuple(plan.pool for plan in plans.values()),
        data=open_data(config, source, model.tokenizer, longest_prompt=_longest_prompt(config, plans)),
        export=partial(_export, config, student, plans, replace(model, params=frozen)),
    )


def configured_student(
    config: TrainConfig, model: ModelConfig, dtype: jnp.dtype
) -> tuple[Student, dict[int, CachePlan]]:
    """The student of a model of those sizes, and what each budget is spent on.

    Raises:
        UserError: a policy without an expiry form, a budget without a pool, or nothing to train.
    """
    settings = scorer_settings(config)
    scorer = None if settings is None else make_scorer(settings, dims_of(model))
    policy = policies.make(config.policy.name, PolicySettings(config.policy.sinks, config.policy.window, scorer))
    student = make_student(config, policy, scorer)
    if config.freeze_base and scorer is None:
        raise UserError(f"freeze_base leaves policy {config.policy.name} nothing to train; it has no scorer")
    size = entry_bytes(model.head_dim, dtype)
    plans = {budget: policy.plan(budget, model, size) for budget in config.policy.budgets}
    return replace(student, capacity=max(plan.capacity for plan in plans.values())), plans


def _starting_weights(config: TrainConfig, model: LoadedModel, scorer: Scorer | None, mesh: Mesh) -> Groups:
    """The groups that are trained, as the run starts: the model's own and a new scorer, or an earlier run's."""
    if config.start_from is not None:
        return _earlier_weights(config, config.start_from, model, scorer, mesh)
    weights: Groups = {} if config.freeze_base else {"base": model.params}
    if scorer is not None:
        keys = jax.random.split(jax.random.key(config.seed), model.config.num_layers)
        weights["scorer"] = sharding.place([scorer.init(key) for key in keys], mesh)
    return weights


def _earlier_weights(config: TrainConfig, folder: str, model: LoadedModel, scorer: Scorer | None, mesh: Mesh) -> Groups:
    earlier = load_model(folder, jnp.float32, mesh)
    if replace(earlier.config, max_position=0) != replace(model.config, max_position=0):
        raise UserError(f"start_from: {folder} holds another architecture than {config.model.source}")
    weights: Groups = {"base": earlier.params}
    if scorer is None:
        return weights
    loaded = load_scorer(folder, earlier, sinks=config.policy.sinks, window=config.policy.window)
    shapes = jax.tree.map(jnp.shape, loaded.params[0])
    if shapes != jax.tree.map(jnp.shape, jax.eval_shape(scorer.init, jax.random.key(0))):
        raise UserError(f"start_from: the scorer of {folder} has other sizes than the one configured under scorer")
    return weights | {"scorer": sharding.place(loaded.params, mesh)}


def scorer_settings(config: TrainConfig) -> ScorerSettings | None:
    """Settings of the policy's scorer, None for a policy that needs none."""
    of_policy: dict[str, ScorerSettings] = {"kvpop": config.scorer.mlstm, "kvpop_mlp": config.scorer.mlp}
    return of_policy.get(config.policy.name)


def make_student(config: TrainConfig, policy: Policy, scorer: Scorer | None) -> Student:
    """The student under that policy, without a capacity.

    Raises:
        UserError: the policy has no expiry form, or evicts nothing.
    """
    settings = config.policy
    if policy.priorities is None or settings.name == "dense":
        raise UserError(f"policy.name is {settings.name!r}; it has no static priorities to train under")
    return Student(policy.priorities, scorer, settings.sinks, settings.window, settings.pin_prompt, config.losses)


def _stacked(params: DecoderParams, dtype: jnp.dtype) -> DecoderParams:
    """The dense model as steps read it."""
    return stack_layers(jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), params))


def _longest_prompt(config: TrainConfig, plans: dict[int, CachePlan]) -> int | None:
    """Tokens of a prompt that can be pinned and leave a pool in every budget; None where prompts are not pinned."""
    return min(plan.sinks + plan.pool - 1 for plan in plans.values()) if config.policy.pin_prompt else None


def _export(
    config: TrainConfig, student: Student, plans: dict[int, CachePlan], base: LoadedModel, folder: Path, weights: Groups
) -> None:
    """Writes the model, if it was trained, and the scorer, if there is one; it then belongs to the model beside it."""
    if "base" in weights:
        export_model(config, base.config, base.tokenizer, folder, weights)
        source = str(Path(config.output_dir) / config.name / "export")
        base = replace(base, source=source, fingerprint=fingerprint(folder.glob("*.safetensors")))
    settings = scorer_settings(config)
    if student.scorer is not None and settings is not None:
        save_scorer(
            folder,
            base,
            student.scorer,
            settings,
            weights["scorer"],
            policy=config.policy.name,
            sinks=student.sinks,
            window=student.window,
            budgets={budget: plan.pool for budget, plan in plans.items()},
            pin_prompt=student.pin_prompt,
        )
