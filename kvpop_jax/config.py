"""What a training run is: frozen dataclasses, read from YAML and the command line by `kvpop_jax.cli.parse`.

Every field is explained here once; `python train.py --help` prints the same words.
"""

from dataclasses import dataclass
from typing import Any, Literal

from kvpop_jax.errors import UserError
from kvpop_jax.evaluation.settings import EvalSettings
from kvpop_jax.eviction import BoundarySettings
from kvpop_jax.processes import ProcessSettings
from kvpop_jax.scorers import MLPSettings, MLSTMSettings
from kvpop_jax.sharding import MeshSettings


def _require(holds: bool, field: str, value: Any, right: str) -> None:
    if not holds:
        raise UserError(f"{field} is {value!r}; it must be {right}")


@dataclass(frozen=True)
class InitConfig:
    """Sizes of a model made from scratch; its vocabulary and special tokens come from the tokenizer.

    Attributes:
        family: "qwen3" (query-key norms) or "llama".
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the feed-forward layers.
        num_layers: Number of decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key-value heads; divides `num_heads`.
        head_dim: Dimensions per head.
        rope_theta: Base of the rotary angles.
        rms_norm_eps: Added to the mean square in every norm.
        tie_embeddings: The output layer is the embedding matrix.
        max_position: Longest sequence the model is made for.
    """

    family: Literal["qwen3", "llama"] = "qwen3"
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    max_position: int = 4096

    def __post_init__(self) -> None:
        _require(
            self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0,
            "model.init.num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads ({self.num_heads})",
        )
        _require(self.head_dim % 2 == 0, "model.init.head_dim", self.head_dim, "even (rotary pairs)")


@dataclass(frozen=True)
class ModelSource:
    """The model that is trained, or that a scorer is trained for.

    Attributes:
        source: Hugging Face folder, GGUF file, installed alias ("smollm2") or hub id. Null makes a model from `init`.
        tokenizer: Folder of the tokenizer of a model made from `init`; otherwise the model's own is used.
        init: Sizes of a new model.
    """

    source: str | None = None
    tokenizer: str | None = None
    init: InitConfig = InitConfig()

    def __post_init__(self) -> None:
        if self.source is None and self.tokenizer is None:
            raise UserError("model.source is null; name a model, or name model.tokenizer to make one from model.init")


@dataclass(frozen=True)
class PolicyConfig:
    """Which eviction rule the model is trained under, and its budget.

    Attributes:
        name: An eviction policy with an expiry form: kvpop, kvpop_mlp, streaming_llm or random.
        sinks: First tokens of every document that never leave the cache.
        window: Most recent tokens that never leave it, the query included.
        budgets: Entries per KV head: sinks + window + pool + what the policy's own state occupies. The rows of a batch
            take turns through the list, so one scorer serves several budgets.
        pin_prompt: The whole prompt never leaves; it counts in the budget.
    """

    name: str = "kvpop"
    sinks: int = 4
    window: int = 256
    budgets: tuple[int, ...] = (4096,)
    pin_prompt: bool = False

    def __post_init__(self) -> None:
        _require(self.sinks >= 0, "policy.sinks", self.sinks, "0 or more")
        _require(self.window >= 1, "policy.window", self.window, "at least 1 (a query sees itself)")
        _require(
            bool(self.budgets) and len(set(self.budgets)) == len(self.budgets), "policy.budgets", list(self.budgets),
            "a list of different numbers",
        )  # fmt: skip
        for budget in self.budgets:
            least = self.sinks + self.window
            _require(budget > least, "policy.budgets", budget, f"more than sinks + window = {least}, to leave a pool")


@dataclass(frozen=True)
class ScorerConfig:
    """What predicts the attention a token will still receive.

    Attributes:
        mlstm: The recurrent memory of policy kvpop.
        mlp: The stateless scorer of policy kvpop_mlp.
    """

    mlstm: MLSTMSettings = MLSTMSettings()
    mlp: MLPSettings = MLPSettings()


@dataclass(frozen=True)
class TargetConfig:
    """The future attention that the scorer learns to rank by.

    Attributes:
        lse: Whose normaliser the attention is taken with: "sparse", the student's own pass (free), or "dense", a second
            pass over all keys.
        group: How the query heads that share a KV head are joined: "max" or "mean".
        power: The future attention of a token is the power mean over later queries with this exponent: 1 is the paper's
            plain mean; above 1, one query that needs the token weighs more than many that barely touch it.
        query_share: Share of the queries that are sampled for the target, new ones every step; 1 takes all.
        floor: Attention mass that is added to every token, so that an ignored token's logarithm is finite.
    """

    lse: Literal["sparse", "dense"] = "sparse"
    group: Literal["max", "mean"] = "max"
    power: float = 1.0
    query_share: float = 1.0
    floor: float = 1e-8

    def __post_init__(self) -> None:
        share = self.query_share
        _require(0 < share <= 1, "losses.target.query_share", share, "above 0 and at most 1")
        _require(self.power >= 1, "losses.target.power", self.power, "at least 1")
        _require(self.floor > 0, "losses.target.floor", self.floor, "above 0")


@dataclass(frozen=True)
class LossConfig:
    """What is minimised: KL to the dense model (base weights) plus the boundary loss (scorer).

    Attributes:
        score_weight: Weight of the boundary loss. The two losses train different weights and are clipped apart, so it
            matters little.
        top_k_logits: The dense model's largest logits that the student is matched on; the student's probabilities are
            of its whole vocabulary.
        target: The future-attention target.
        boundary: The ranking loss at the edge of the pool.
    """

    score_weight: float = 1.0
    top_k_logits: int = 256
    target: TargetConfig = TargetConfig()
    boundary: BoundarySettings = BoundarySettings()

    def __post_init__(self) -> None:
        _require(self.score_weight > 0, "losses.score_weight", self.score_weight, "above 0")
        _require(self.top_k_logits > 0, "losses.top_k_logits", self.top_k_logits, "at least 1")


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how documents are laid into rows.

    Attributes:
        source: "files" reads `paths`; "tiny_math" generates problems on demand.
        paths: JSONL or Parquet files, or folders of them. A row holds `messages` (a chat), `problem` and `response`,
            `prompt` and `response`, or `text`. Files of benchmarks (`aime24.jsonl`, ...) are refused.
        problems: How many different problems tiny_math generates before it repeats.
        overlong: What becomes of a document longer than `seq_len`: "skip" or "truncate". Either is counted.
        packing: "segments" lays several documents into a row, apart from each other; "shared" lets all documents of a
            row share one attention, cache and scorer state, as the paper does; "none" gives each document its own row.
        loss_tokens: Predict "all" tokens, or the "response" only. A document without a prompt is all response.
        workers: Processes that prepare batches; 0 prepares them in a thread of the training process.
    """

    source: Literal["tiny_math", "files"] = "files"
    paths: tuple[str, ...] = ()
    problems: int = 100_000_000
    overlong: Literal["skip", "truncate"] = "skip"
    packing: Literal["segments", "shared", "none"] = "segments"
    loss_tokens: Literal["all", "response"] = "all"
    workers: int = 0

    def __post_init__(self) -> None:
        if self.source == "files" and not self.paths:
            raise UserError("data.paths is empty; name JSONL or Parquet files, or folders of them")
        _require(1 <= self.problems < 2**31, "data.problems", self.problems, "between 1 and 2**31 - 1")
        _require(self.workers >= 0, "data.workers", self.workers, "0 or more")


@dataclass(frozen=True)
class ScheduleConfig:
    """A learning rate over the run: linear warm-up, then constant or a cosine.

    Attributes:
        lr: Peak learning rate.
        shape: "constant" after the warm-up, or "cosine" down to `final` times the peak at the last step.
        warmup: Steps of linear warm-up from 0.
        final: Share of the peak where a cosine ends.
    """

    lr: float = 1e-3
    shape: Literal["constant", "cosine"] = "cosine"
    warmup: int = 100
    final: float = 0.1

    def __post_init__(self) -> None:
        _require(self.lr > 0, "lr", self.lr, "above 0")
        _require(self.warmup >= 0, "warmup", self.warmup, "0 or more")
        _require(0 <= self.final <= 1, "final", self.final, "between 0 and 1")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW for two groups of weights, each with its own learning rate and its own clipping.

    Attributes:
        base: Learning rate of the model's weights.
        scorer: Learning rate of the scorer.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay of matrices; vectors (norms, biases, gate offsets, lambda) are not decayed.
        clip: Largest global norm of each group's gradient.
    """

    base: ScheduleConfig = ScheduleConfig(lr=8e-5, shape="constant")
    scorer: ScheduleConfig = ScheduleConfig(lr=1e-3)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    clip: float = 1.0

    def __post_init__(self) -> None:
        _require(
            all(0 <= beta < 1 for beta in self.betas), "optimizer.betas", list(self.betas), "two numbers in [0, 1)"
        )
        _require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "0 or more")
        _require(self.clip > 0, "optimizer.clip", self.clip, "above 0")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of model, scorer, optimizer and data position, for resuming.

    Attributes:
        every: Steps between checkpoints. One is also written at the end and when the run is interrupted.
        keep: How many of the latest are kept.
        keep_best: How many more are kept, those with the lowest mean loss of the steps since the one before.
    """

    every: int = 500
    keep: int = 2
    keep_best: int = 0

    def __post_init__(self) -> None:
        _require(self.every >= 1, "checkpoint.every", self.every, "at least 1")
        _require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")
        _require(self.keep_best >= 0, "checkpoint.keep_best", self.keep_best, "0 or more")


@dataclass(frozen=True)
class LogConfig:
    """What is printed and recorded.

    Attributes:
        every: Steps between printed lines, and, where the base is frozen, between measurements of the KL.
        tensorboard: Write TensorBoard events beside metrics.jsonl.
    """

    every: int = 20
    tensorboard: bool = True

    def __post_init__(self) -> None:
        _require(self.every >= 1, "log.every", self.every, "at least 1")


@dataclass(frozen=True)
class RolloutConfig:
    """Text that the model itself writes, for a distillation on its own distribution (method rollout).

    Attributes:
        prompts: JSONL files, or folders of them. A row holds `messages` (what comes after the last user message is
            dropped) or `problem` or `prompt`, the text of a user message. Files of benchmarks are refused.
        per_prompt: Completions of each prompt.
        rows: Sequences decoded together.
        max_new_tokens: Longest completion in tokens; those that are cut there are kept apart.
        temperature: Sampling temperature, 0 is greedy.
        top_k: Sample among this many of the likeliest tokens; 0 for all.
        top_p: Sample among the likeliest tokens that together reach this probability; 1 for all.
    """

    prompts: tuple[str, ...] = ()
    per_prompt: int = 1
    rows: int = 16
    max_new_tokens: int = 16_384
    temperature: float = 0.6
    top_k: int = 20
    top_p: float = 0.95

    def __post_init__(self) -> None:
        for field in ("per_prompt", "rows", "max_new_tokens"):
            _require(getattr(self, field) >= 1, f"rollout.{field}", getattr(self, field), "at least 1")
        _require(self.temperature >= 0, "rollout.temperature", self.temperature, "0 or more")
        _require(self.top_k >= 0, "rollout.top_k", self.top_k, "0 or more")
        _require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "above 0 and at most 1")


@dataclass(frozen=True)
class TrainConfig:
    """Train a model from scratch, or distil a model into one that decodes with a bounded cache.

    Attributes:
        name: Name of the run; everything is written to `output_dir`/`name`.
        output_dir: Folder of runs.
        seed: Seed of initial weights, data order and sampled queries.
        method: "pretrain" minimises cross entropy of a dense model; "distill" trains under an eviction policy;
            "rollout" trains nothing and lets the model answer `rollout.prompts`: JSONL that `data.paths` reads.
        freeze_base: Train the scorer only and leave the model as it is (method distill).
        start_from: Export folder of an earlier distillation to go on from: its weights and its scorer, while the dense
            model that teaches stays `model.source`. For budgets in stages: weights that learned a small one first.
        evaluate: After training, run the evaluation described by `eval` and print its table.
        steps: Optimizer steps.
        batch_size: Rows per step.
        accumulate: Parts that a batch is split into, one after the other, to save memory; divides `batch_size`. Every
            token weighs the same in whatever part (losses.boundary.balance is of each part).
        seq_len: Tokens per row.
        dtype: Type of weights and activations inside a step: "auto" is bfloat16 on accelerators and float32 on CPU.
            Trained weights are kept in float32 beside it.
        export_dtype: Type of an exported model's weights.
        remat: Recompute each layer in the backward pass instead of storing it: slower, much less memory.
        model: The model.
        policy: The eviction policy.
        scorer: The scorer of a learned policy.
        losses: The losses of method distill.
        data: The data.
        optimizer: The optimizer.
        checkpoint: Checkpoints.
        log: Logs.
        eval: The evaluation after training.
        rollout: What method rollout writes.
        mesh: The devices that a training is spread over; for method rollout, those of one process. A run may go on on
            another mesh than it began on.
        processes: The processes of the run, for several hosts.
    """

    name: str
    model: ModelSource
    method: Literal["pretrain", "distill", "rollout"] = "distill"
    freeze_base: bool = False
    start_from: str | None = None
    evaluate: bool = False
    output_dir: str = "runs"
    seed: int = 0
    steps: int = 2000
    batch_size: int = 64
    accumulate: int = 1
    seq_len: int = 16_384
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    policy: PolicyConfig = PolicyConfig()
    scorer: ScorerConfig = ScorerConfig()
    losses: LossConfig = LossConfig()
    data: DataConfig = DataConfig(source="tiny_math")
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    eval: EvalSettings = EvalSettings()
    rollout: RolloutConfig = RolloutConfig()
    mesh: MeshSettings = MeshSettings()
    processes: ProcessSettings = ProcessSettings()

    def __post_init__(self) -> None:
        named = self.name and not set(self.name) & set("/\\") and self.name not in (".", "..")
        _require(bool(named), "name", self.name, "a folder name")
        for field in ("steps", "batch_size", "accumulate"):
            _require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        _require(self.seq_len >= 2, "seq_len", self.seq_len, "at least 2 (one token predicts the next)")
        divides = self.batch_size % self.accumulate == 0
        _require(divides, "accumulate", self.accumulate, f"a divisor of batch_size ({self.batch_size})")
        if self.method == "pretrain" and self.freeze_base:
            raise UserError("freeze_base leaves method pretrain nothing to train; use method distill")
        if self.start_from is not None and (self.method != "distill" or self.freeze_base):
            raise UserError("start_from is for method distill without freeze_base; elsewhere name it as model.source")
        if self.method != "pretrain" and self.model.source is None:
            raise UserError(f"model.source is null; method {self.method} needs a trained model")
        if self.method == "rollout" and not self.rollout.prompts:
            raise UserError("rollout.prompts is empty; name JSONL files of prompts, or folders of them")
