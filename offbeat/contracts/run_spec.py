"""What a user asks for: the run specification, version 1.

Field names follow TRL and prime-rl where they have one. Every section but `model`, `data`,
`rewards` (or `lora`, in a supervised run) and the number of training steps has defaults that work.
Cross-field rules live in the validators below, so a spec that parses is a spec that can be run.
"""

from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from offbeat.contracts.base import Contract
from offbeat.contracts.data_sources import DataSection
from offbeat.contracts.run_kinds import (
    RunKind,
    SftSection,
    full_complaint,
    kind_complaint,
    rewards_complaint,
)

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]{0,63}$")]
PoolName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]

ADAPTER_TARGETS_REFUSED = frozenset({"lm_head", "embed_tokens", "embed_out", "wte"})
"""Modules that engines serve wrongly or not at all when they carry LoRA (vllm#51594, trl#7017)."""


class ModelSection(Contract):
    """The base model, which no run ever changes."""

    id: Annotated[str, Field(min_length=1, max_length=512)]
    """An alias (`smollm2-135m-instruct`), a hub id, a folder, or an `s3://` prefix."""
    revision: Annotated[str, Field(max_length=128)] | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The type of the base weights and of the arithmetic; adapter masters are always float32."""
    quantization: Literal["none", "nf4"] = "none"
    """`nf4`: the trainer holds the linear layers in 4 bits (QLoRA). Generators may serve them as
    they are."""
    chat_template: Annotated[str, Field(max_length=65_536)] | None = None
    """A Jinja template in place of the tokenizer's own."""


class LoraSection(Contract):
    """The adapter: W' = W + (alpha / rank) B A. Names as in PEFT's `LoraConfig`."""

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    alpha: Annotated[float, Field(gt=0, le=4096)] = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    use_dora: bool = False
    target_modules: Literal["all-linear"] | tuple[Annotated[str, Field(min_length=1)], ...] = (
        "all-linear"
    )
    init_from: Annotated[str, Field(max_length=512)] | None = None
    """Start from `<run>@<version>` or from a PEFT folder under `s3://`."""

    @model_validator(mode="after")
    def _engines_can_serve_it(self) -> Self:
        if self.use_dora:
            raise ValueError(
                "use_dora cannot be served: vLLM refuses DoRA adapters; leave it out, or raise rank"
            )
        return self

    @model_validator(mode="after")
    def _targets_can_be_served(self) -> Self:
        if self.target_modules == "all-linear":
            return self
        if not self.target_modules:
            raise ValueError('target_modules is empty: name at least one module, or "all-linear"')
        refused = ADAPTER_TARGETS_REFUSED & {name.split(".")[-1] for name in self.target_modules}
        if refused:
            raise ValueError(
                f"target_modules {sorted(refused)} cannot be served as LoRA by the engines; "
                "leave out embeddings and the head"
            )
        return self


AnswerExtraction = Literal["last_number", "last_line", "tag", "regex", "none"]


class RewardBase(Contract):
    """One part of the reward; the reward of a sample is the sum of `weight * part`."""

    name: Name | None = None
    """How the part is called in tables and metrics; the type where none is given."""
    weight: float = 1.0
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Wall-clock limit to score one job's samples; a part that is late counts as None for them."""

    @property
    def label(self) -> str:
        """The column name of this part."""
        return self.name or getattr(self, "type", "reward")


class ExtractingReward(RewardBase):
    """A reward that first finds the answer in the completion."""

    extract: AnswerExtraction = "none"
    pattern: Annotated[str, Field(max_length=1024)] | None = None
    """With `regex`: group 1 is the answer. With `tag`: the tag's name (default `answer`)."""

    @model_validator(mode="after")
    def _regex_has_a_pattern(self) -> Self:
        if self.extract == "regex" and not self.pattern:
            raise ValueError('extract = "regex" needs a pattern whose group 1 is the answer')
        return self


class ReasoningGymReward(ExtractingReward):
    """reasoning-gym's own score of the extracted answer."""

    type: Literal["reasoning_gym"]


class ExactMatchReward(ExtractingReward):
    """1 where the extracted answer equals the column, else 0."""

    type: Literal["exact_match"]
    field: Annotated[str, Field(min_length=1, max_length=128)] = "answer"
    ignore_case: bool = False


class RegexReward(RewardBase):
    """1 where the pattern is found in the completion, else 0."""

    type: Literal["regex"]
    pattern: Annotated[str, Field(min_length=1, max_length=1024)]
    full_match: bool = False


class PythonReward(RewardBase):
    """A function in TRL's signature: `f(completions, **columns) -> list[float | None]`."""

    type: Literal["python"]
    path: Annotated[
        str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", max_length=256)
    ]
    """`package.module:function`, importable on the generators."""


RewardSection = Annotated[
    ReasoningGymReward | ExactMatchReward | RegexReward | PythonReward,
    Field(discriminator="type"),
]


class RolloutSection(Contract):
    """How completions are sampled."""

    group_size: Annotated[int, Field(ge=1, le=1024)] = 8
    groups_per_step: Annotated[int, Field(ge=1, le=4096)] = 8
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] = 256
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 samples from the whole vocabulary."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=16)] = ()
    dynamic_sampling: bool = False
    """DAPO: groups whose rewards are all equal are replaced by fresh ones before the step."""
    oversampling_max: Annotated[float, Field(ge=1, le=100)] = 3.0
    """With `dynamic_sampling`: groups generated for a step, at most, as a multiple of
    `groups_per_step`; then the step takes what there is, and an event says so."""

    @property
    def samples_per_step(self) -> int:
        """Samples in one optimizer step."""
        return self.group_size * self.groups_per_step


class TrainSection(Contract):
    """The optimizer step."""

    steps: Annotated[int, Field(ge=1, le=1_000_000)]
    loss: Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "gspo", "sapo", "dppo"] = "dapo"
    advantage: Literal["group_mean", "group_mean_std", "batch_std", "leave_one_out"] = "group_mean"
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-4
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    epsilon_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    epsilon_high: Annotated[float, Field(gt=0, le=10)] = 0.28
    """The ratio is held within [1 - epsilon_low, 1 + epsilon_high]; `cispo` has the upper bound
    only, `sapo` and `dppo` have bounds of their own, `gspo` was published with 3e-4 and 4e-4."""
    beta: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Weight of the k3 divergence from the base model; 0 computes no reference."""
    correction: Literal["none", "tis", "tis_sequence", "mis"] = "tis"
    correction_cap: Annotated[float, Field(ge=1, le=100)] = 2.0
    """Bound of the importance weight; `mis` rejects a token below its inverse too."""
    off_policy_mask: Annotated[float, Field(ge=0, le=100)] | None = None
    """Leaves out a sequence with a negative advantage that the policy has moved away from by more
    than this mean log-probability."""
    overlong_cache: Annotated[int, Field(ge=0)] = 0
    """Tokens before `max_new_tokens` over which the reward falls by up to 1."""
    token_budget: Annotated[int, Field(ge=64)] | Literal["auto"] = "auto"
    """Tokens forwarded at once."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    checkpoint_every: Annotated[int, Field(ge=1, le=10_000)] = 1
    """In full fine-tuning: every Nth version has weights and optimizer state in the store. Who goes
    on from another one takes the steps after the last such version again. The state of an adapter
    is small: all of its versions have it."""

    @model_validator(mode="after")
    def _loss_and_correction_agree(self) -> Self:
        if self.loss == "dppo" and self.correction != "none":
            raise ValueError(
                'loss = "dppo" takes its ratio against the policy that sampled, which needs '
                'correction = "none"'
            )
        return self

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.warmup_steps >= self.steps and self.warmup_steps > 0:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) must be below steps ({self.steps})"
            )
        return self


class StalenessSection(Contract):
    """How far behind the trained policy a rollout may be."""

    max_versions: Annotated[int, Field(ge=0, le=64)] = 4
    """Bound of v_train - v_sample; 0 is synchronous GRPO."""
    policy: Literal["drop", "keep"] = "drop"
    """What happens to a group that is older when its turn comes."""
    max_inflight_groups: Annotated[int, Field(ge=1)] | None = None
    """Groups being generated at once; none takes (max_versions + 1) * groups_per_step."""


class EvalSection(Contract):
    """Evaluation on the held-out prompts; 0 is off, else also before the first and after the
    last."""

    every_steps: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    samples_per_prompt: Annotated[int, Field(ge=1, le=256)] = 1


class LimitsSection(Contract):
    """What a run may use up before it is stopped with a reason."""

    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Attempts a job has before it is dead."""
    max_runtime_s: Annotated[float, Field(gt=0)] | None = None
    max_gpu_seconds: Annotated[float, Field(gt=0)] | None = None


class RetentionSection(Contract):
    """What stays of a run's past. What is in use stays whatever is written here: the newest version
    and version 0, what workers may still pull, rollouts that are not trained yet."""

    keep_last: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    """Adapters of the newest versions."""
    keep_last_states: Annotated[int, Field(ge=1, le=1_000_000)] = 3
    """Trainer states of the newest versions, several times as large as the adapters."""
    keep_every: Annotated[int, Field(ge=0, le=1_000_000)] = 10
    """Every Nth version stays, with its trainer state; 0 keeps none of the old ones."""
    rollout_days: Annotated[float, Field(gt=0, le=36_500)] = 30
    """Days for which samples stay after they were made, and with them the replay of their steps."""


class RunSpec(Contract):
    """A whole run. TOML, YAML and JSON have the same shape."""

    name: Name = "run"
    kind: RunKind = "grpo"
    pool: PoolName = "default"
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    tags: Annotated[dict[Name, Annotated[str, Field(max_length=256)]], Field(max_length=32)] = (
        Field(default_factory=dict)
    )
    model: ModelSection
    lora: LoraSection | None = Field(default=None, validate_default=True)
    """None, in a supervised run: all weights of the model are trained."""
    data: DataSection
    rewards: Annotated[tuple[RewardSection, ...], Field(max_length=32)] = Field(
        default=(), validate_default=True
    )
    rollout: RolloutSection = RolloutSection()
    sft: SftSection = SftSection()
    train: TrainSection
    staleness: StalenessSection = StalenessSection()
    eval: EvalSection = EvalSection()
    limits: LimitsSection = LimitsSection()
    retention: RetentionSection = RetentionSection()

    @field_validator("lora")
    @classmethod
    def _only_supervised_runs_train_all(
        cls, lora: LoraSection | None, info: ValidationInfo
    ) -> LoraSection | None:
        return LoraSection() if lora is None and info.data.get("kind") != "sft" else lora

    @field_validator("rewards")
    @classmethod
    def _rewards_fit_kind(
        cls, rewards: tuple[RewardSection, ...], info: ValidationInfo
    ) -> tuple[RewardSection, ...]:
        if complaint := rewards_complaint(info.data.get("kind"), bool(rewards)):
            raise ValueError(complaint)
        return rewards

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        quantization, every = self.model.quantization, self.train.checkpoint_every
        if complaint := (
            kind_complaint(self.kind, self)
            or full_complaint(quantization, every, is_full=self.is_full)
        ):
            raise ValueError(complaint)
        labels = [reward.label for reward in self.rewards]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"rewards {twice} share a name: give each [[rewards]] its own `name`")
        if self.eval.every_steps and not self.data.eval_size:
            raise ValueError("eval.every_steps needs held-out prompts: set data.eval_size")
        if self.train.overlong_cache > self.rollout.max_new_tokens:
            raise ValueError(
                f"train.overlong_cache ({self.train.overlong_cache}) must not exceed "
                f"rollout.max_new_tokens ({self.rollout.max_new_tokens})"
            )
        return self

    @property
    def is_full(self) -> bool:
        """Whether all weights of the model are trained."""
        return self.lora is None

    @property
    def adapter(self) -> LoraSection:
        """The adapter of a run that has one, as all have but those of full fine-tuning."""
        assert self.lora is not None, "full fine-tuning has no adapter"
        return self.lora

    @property
    def init_from(self) -> str | None:
        """The adapter to start from, if there is one."""
        return self.lora.init_from if self.lora else None

    @property
    def eval_versions(self) -> tuple[int, ...]:
        """The policy versions that are evaluated by jobs of their own, on samples."""
        return self._evaluated_versions if self.kind == "grpo" else ()

    @property
    def validated_versions(self) -> tuple[int, ...]:
        """The policy versions whose validation loss belongs to the step that makes them."""
        return self._evaluated_versions if self.kind == "sft" else ()

    @property
    def _evaluated_versions(self) -> tuple[int, ...]:
        """Before the first step, every N steps, after the last."""
        every = self.eval.every_steps
        if not every:
            return ()
        return tuple(sorted({*range(0, self.train.steps, every), self.train.steps}))
