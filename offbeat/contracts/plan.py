"""What a plan is asked for, and what it answers: the memory, speed and traffic of a run."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from offbeat.contracts.base import Contract

Verdict = Literal["fits", "tight", "does not fit"]
Sharding = Literal["none", "within nodes", "across nodes"]
Method = Literal["lora", "qlora", "full"]
Phase = Literal["head", "backward", "end", "update"]


class PlanOptions(Contract):
    """What stands in for the spec's own words; none leaves the spec, or what the plan chooses."""

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    quantization: Literal["none", "nf4"] | None = None
    full: bool = False
    """All weights are trained, not an adapter."""
    lora_rank: Annotated[int, Field(ge=1, le=512)] | None = None
    token_budget: Annotated[int, Field(ge=64, le=2**24)] | None = None
    gradient_checkpointing: bool | None = None
    offload: bool | None = None
    """Parameters, gradients and optimizer states on the host."""
    prompt_tokens: Annotated[int, Field(ge=1, le=2**20)] = 256
    """Of a prompt, which the spec does not say."""
    link_gbit_per_s: Annotated[float, Field(gt=0, le=10_000)] = 10.0
    """Between nodes."""


class PlanRequest(Contract):
    """`POST /v1/plan`."""

    spec: JsonValue
    """As for `POST /v1/runs`."""
    gpus: Annotated[str, Field(min_length=1, max_length=64)]
    """Of one node: `2x24GB`, `8xA100-80GB`, `1xH100`."""
    nodes: Annotated[int, Field(ge=1, le=1024)] = 1
    config: Annotated[dict[str, JsonValue], Field(max_length=256)] | None = None
    """The model's `config.json`, for a model that is not known by name."""
    options: PlanOptions = PlanOptions()


class PlanSettings(Contract):
    """How the run would be trained."""

    method: Method
    lora_rank: int | None
    token_budget: int
    gradient_checkpointing: bool
    offload: bool
    sharding: Sharding
    chosen: tuple[str, ...]
    """Which of these the plan chose, because the spec leaves them open."""


class MemoryByKind(Contract):
    """Bytes on each GPU at the moment of the step that takes most."""

    moment: Phase
    """The end of the forward, the backward of the last block or of the first, or the update."""
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    gathered: int
    """Weights and gradients put together from all ranks, for a block or two at a time."""
    overhead: int
    """The allocator's slack, CUDA's context, NCCL's buffers."""
    total: int


class RankMemory(Contract):
    """Bytes of one rank, or of several that are equal."""

    ranks: str
    gpu_bytes: int
    host_bytes: int


class GatheredUnit(Contract):
    """Weights that FSDP2 puts together from all ranks at once."""

    name: Literal["a block", "the embedding", "embedding and head"]
    size_bytes: int


class Remedy(Contract):
    """A change with which the run would fit."""

    change: str
    gpu_bytes: int
    verdict: Verdict


class PlanSpeed(Contract):
    """An estimate; `assumptions` of the plan says what it rests on."""

    tokens_per_s: int
    """Of all GPUs together."""
    mfu: float
    """Share of the GPUs' peak that goes into the model's own arithmetic."""
    step_s: float
    """A step with completions or examples of full length."""


class PlanTraffic(Contract):
    """Bytes that move for one optimizer step."""

    micro_batches: int
    """On each rank, with completions or examples of full length."""
    within_node_bytes: int
    """To each GPU from the others of its node."""
    between_nodes_bytes: int
    """Over each node's link."""
    between_nodes_s: float
    published_bytes: int
    """Of a version, to the store: the adapter's weights, or in full fine-tuning the state, at every
    `checkpoint_every`-th."""


class DryRun(Contract):
    """Peak bytes that a step's tensors take, counted while the trainer runs without data."""

    total: int
    by_kind: dict[str, int]
    formula: int
    """What the formula says for the same tensors: without the allocator's slack and the context."""


class Plan(Contract):
    """What a run needs on given hardware."""

    model: str
    kind: Literal["grpo", "sft"]
    num_parameters: int
    num_trained: int
    gpus: str
    nodes: int
    usable_bytes: int
    """Of each GPU's memory."""
    settings: PlanSettings
    memory: MemoryByKind
    low_bytes: int
    high_bytes: int
    """The band in which the published measurements lie: 15 % below and above."""
    ranks: tuple[RankMemory, ...]
    largest_unit: GatheredUnit | None
    """None where nothing is divided or offloaded."""
    verdict: Verdict
    remedies: tuple[Remedy, ...]
    """The cheapest changes that would make it fit, where it does not."""
    speed: PlanSpeed | None
    """None where only the memory of the GPUs is known."""
    traffic: PlanTraffic
    assumptions: tuple[str, ...]
    dry_run: DryRun | None = None
