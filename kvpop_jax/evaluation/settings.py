"""What an evaluation is asked to do: one frozen record, for `eval.py` and for the `eval:` section of a training."""

from dataclasses import dataclass
from typing import Literal

from kvpop_jax.errors import UserError
from kvpop_jax.policies.machinery.settings import MethodSettings
from kvpop_jax.sharding import MeshSettings


@dataclass(frozen=True)
class EvalSettings:
    """Which policies, at which budgets, on which tasks, and how rollouts are drawn.

    Attributes:
        policies: Names of the policies to compare (`eval.py --list` prints them). `dense` keeps everything, is run once
            and not per budget, and is what "retained" divides by.
        plan: Plan files of `calibrate.py` (PolyKV), each run as one more policy at the budget it was made for.
        budgets: Budgets in entries per KV head: sinks + window + pool + what the policy's own state occupies.
        tasks: Names of tasks, or of groups that stand for all of theirs (`eval.py --list` prints them).
        problems: Problems per task; null takes the task's own number (every row of a data file).
        rollouts: Completions drawn per problem; pass@1 is their mean. Tasks that read text instead ignore it.
        temperature: Sampling temperature, 0 is greedy; null is greedy with one rollout and 0.6 with more.
        top_k: Sample among this many of the likeliest tokens; 0 for all.
        top_p: Sample among the likeliest tokens that together reach this probability; 1 for all.
        max_new_tokens: Longest completion in tokens; null takes the task's own limit.
        batch_size: Sequences decoded together; when one ends, the next takes its row.
        seed: Seed of generated problems, of sampling and of the bootstrap. A rollout's own seed depends on this, the
            problem and the rollout's number only: not on the policy, nor on what else is in the batch.
        sinks: First tokens of a sequence that are never evicted, for policies that keep sinks; null takes what the
            scorer was trained with, or 4 without a scorer.
        window: Most recent tokens, the query included, that are protected, for policies with a window; null takes what
            the scorer was trained with, or 32 without a scorer.
        pin_prompt: Never evict the prompt; it counts in the budget, and a budget it would fill is refused.
        cache_dtype: int8 or fp8 to keep keys and values in 8 bits, one scale for each token and KV head, under every
            policy, dense included; null keeps the type of the weights. Budgets stay entries per KV head.
        context: Context in tokens that compression is measured against: 1 - entries / context; null takes the task's.
        data_dir: Folder of the task files (`aime25.jsonl`, `squad.json`, ...) and of running text (`longtext/*.txt`).
        text: Text file that `lm` reads, and that `passkey` and RULER hide things in, instead of `data_dir/longtext`.
        max_prompt_tokens: Longest prompt of LongBench in tokens, chat template not counted: longer ones lose their
            middle; null leaves them whole. LongBench itself stays 500 to 1300 below a model's limit (31500 of 32768).
        run_code: Let `livecodebench` run the programs that the model writes; they have your rights on this machine.
        families: Problem families of `tiny_math`; empty for those of the training mix.
        split: Split of `tiny_math`'s problems: train, valid or test; their problems are drawn apart.
        problem_tokens: Shortest and longest problem of `tiny_math`, prompt and worked solution together, in tokens.
        lengths: Sequence lengths in tokens of the tasks that are made to a length (`lm`, `passkey`, RULER, whose
            lengths hold the answer too).
        depths: Where `passkey` hides its key, as fractions of the text before it.
        prefix: Share of an `lm` window that is read as the prompt; the rest is scored token by token.
        methods: Hyper-parameters of the published policies.
        mesh: The devices that the model is spread over, all of one process, along `model` only: prompts are read a few
            at a time, which do not divide. Several processes share the problems among them.
    """

    policies: tuple[str, ...] = ("dense", "streaming_llm", "tova", "random", "kvpop")
    plan: tuple[str, ...] = ()
    budgets: tuple[int, ...] = (256, 128)
    tasks: tuple[str, ...] = ("tiny_math",)
    problems: int | None = None
    rollouts: int = 1
    temperature: float | None = None
    top_k: int = 20
    top_p: float = 0.95
    max_new_tokens: int | None = None
    batch_size: int = 16
    seed: int = 0
    sinks: int | None = None
    window: int | None = None
    pin_prompt: bool = False
    cache_dtype: Literal["int8", "fp8"] | None = None
    context: int | None = None
    data_dir: str | None = None
    text: str | None = None
    max_prompt_tokens: int | None = None
    run_code: bool = False
    families: tuple[str, ...] = ()
    split: Literal["train", "valid", "test"] = "test"
    problem_tokens: tuple[int, int] = (450, 1000)
    lengths: tuple[int, ...] = (1024,)
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    prefix: float = 0.5
    methods: MethodSettings = MethodSettings()
    mesh: MeshSettings = MeshSettings()

    def __post_init__(self) -> None:
        for name in ("policies", "tasks"):
            values = getattr(self, name)
            if not values:
                raise UserError(f"{name} is empty: name at least one (`python eval.py --list` prints them)")
            if len(set(values)) != len(values):
                raise UserError(f"{name} names one of {', '.join(values)} twice")
        if len(set(self.budgets)) != len(self.budgets) or any(budget < 1 for budget in self.budgets):
            raise UserError(f"budgets must be different positive numbers of entries, not {list(self.budgets)}")
        if not self.budgets and set(self.policies) != {"dense"}:
            raise UserError("budgets is empty: every policy but dense needs at least one, in entries per KV head")
        for name in ("rollouts", "batch_size", "problems", "max_new_tokens", "max_prompt_tokens", "window", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, not {value}")
        for name in ("sinks", "top_k"):
            if (getattr(self, name) or 0) < 0:
                raise UserError(f"{name} must not be negative, as {getattr(self, name)} is")
        if self.temperature is not None and self.temperature < 0:
            raise UserError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not self.lengths or any(length < 64 for length in self.lengths):
            raise UserError(f"lengths must be token counts of at least 64, not {list(self.lengths)}")
        if not self.depths or any(not 0 <= depth <= 1 for depth in self.depths):
            raise UserError(f"depths must be fractions between 0 and 1, not {list(self.depths)}")
        self.mesh.only_model("mesh of an evaluation")
        if not 0 < self.prefix < 1:
            raise UserError(f"prefix must be a share of the window between 0 and 1, not {self.prefix}")

    @property
    def sampling_temperature(self) -> float:
        """The temperature in force: greedy for a single rollout, the Qwen3 model card's 0.6 for several."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.rollouts == 1 else 0.6
