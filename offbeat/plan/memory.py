"""Bytes on one GPU by kind, at each moment of a step that can be its peak; and on the host.

    head      the forward is done: all kept activations, and the logits
    backward  of the last block: its activations again, its weights, its gradients
    end       the backward of the first block: all gradients, and that block
    update    gradients, moments and the new state; no activations

Every rank holds a share of what is sharded and all of its own activations. Rank 0 may also keep
what the others need not, an adapter's masters and moments, and its host memory takes what is
published.
"""

from dataclasses import dataclass, fields, replace

from offbeat.contracts.plan import GatheredUnit, Phase
from offbeat.plan.activations import backward_bytes, block_bytes, checkpoint_bytes
from offbeat.plan.architecture import Architecture
from offbeat.plan.parameters import lora_parameters, parameters_of
from offbeat.plan.setup import Recipe, Setup

NF4_BYTES = 0.5
NAIVE_LOGITS_BYTES = 15.5
"""A logit and its copies, in the model's and in float32, with their gradients (reference)."""
CHUNKED_LOGITS_BYTES = 2.75
"""A logit in bfloat16, with its gradient chunk by chunk (fitted to torchtune's ladder)."""
HEAD_POSITIONS = 64
"""Positions whose logits exist at once in `offbeat.algorithms.logprobs`: float32, twice, and their
gradient in the model's type."""
UNITS_GATHERED = 2
"""Blocks whose weights are there at once: the one in use, and the next one on its way."""
STATE_FILE_BYTES = 2**30
"""Of the state that is written, or read, at once; see `services/trainer/sharded_state.py`."""
PROCESS_BYTES = 2_000_000_000
"""A Python process with torch and CUDA's libraries, on the host."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes by kind at one moment."""

    phase: Phase
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    """Weights and gradients of whole units, put together from all ranks or brought from the host,
    and a weight that is dequantised."""
    overhead: float

    @property
    def total(self) -> float:
        """All kinds."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "phase")


def peak(model: Architecture, setup: Setup, recipe: Recipe) -> Moment:
    """The moment that takes most."""
    return max(moments(model, setup, recipe), key=lambda moment: moment.total)


def moments(model: Architecture, setup: Setup, recipe: Recipe) -> tuple[Moment, ...]:
    """Each moment that can be the peak."""
    on_gpu = held_bytes(model, setup, recipe).on_gpu(setup, recipe)
    kept, block = _kept_bytes(model, setup, recipe), block_bytes(model, setup, recipe)
    again = kept + block if setup.is_checkpointed else kept
    early = on_gpu.gradients if recipe.keeps_gradients else 0
    back = backward_bytes(model, setup, recipe)
    gathered = _gathered_in_backward(model, setup, recipe)

    def moment(phase: Phase, gradients: float, **kinds: float) -> Moment:
        return _moment(recipe, phase, on_gpu, gradients, **kinds)

    return (
        moment(
            "head",
            early,
            activations=kept,
            logits=logits_bytes(model, setup, recipe),
            gathered=_gathered_at_head(model, setup, recipe),
        ),
        moment("backward", early, activations=again + back, gathered=gathered),
        moment("end", on_gpu.gradients, activations=block + back, gathered=gathered),
        moment("update", on_gpu.gradients),
    )


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """What a rank holds from step to step, and what an update makes."""

    quant_state: float
    """The quantisation's constants, which never leave the GPU."""
    frozen: float = 0
    weights: float = 0
    """Those that are trained, and copies of them."""
    gradients: float = 0
    moments: float = 0
    update: float = 0

    def on_gpu(self, setup: Setup, recipe: Recipe) -> "HeldBytes":
        """What is left there by an offload."""
        if not setup.is_offloaded:
            return self
        if recipe.keeps_adapter and setup.trains_adapter:
            return replace(self, frozen=0)
        return HeldBytes(quant_state=self.quant_state)

    @property
    def total(self) -> float:
        """All kinds."""
        return sum(getattr(self, field.name) for field in fields(self))


def held_bytes(model: Architecture, setup: Setup, recipe: Recipe) -> HeldBytes:
    """Parameters, gradients and optimizer states of a rank: its share, or all of them."""
    counts, trained = parameters_of(model), trained_parameters(model, setup)
    base = recipe.base_bytes or setup.dtype_bytes
    frozen: float = 0
    if setup.method == "lora":
        frozen = counts.total * base
    elif setup.method == "qlora":
        frozen = counts.linear * NF4_BYTES + (counts.total - counts.linear) * base
    is_adapter = setup.trains_adapter
    weights = trained * (recipe.trained_bytes + (recipe.copy_bytes if is_adapter else 0))
    gradients = 0 if recipe.updates_in_backward else trained * recipe.gradient_bytes
    paged = 0 if recipe.moments_are_paged else trained * recipe.moment_bytes
    update = trained * recipe.update_bytes if is_adapter else 0
    n = setup.num_shards
    sharers = 1 if recipe.keeps_adapter and is_adapter else n
    quant_state = counts.linear * recipe.quant_state_bytes if setup.method == "qlora" else 0
    return HeldBytes(
        quant_state=quant_state / n if recipe.shards_quant_state else quant_state,
        frozen=frozen / n,
        weights=weights / sharers,
        gradients=gradients / sharers,
        moments=paged / sharers,
        update=update / sharers,
    )


def trained_parameters(model: Architecture, setup: Setup) -> int:
    """All of them, or the adapter's."""
    if setup.method == "full":
        return parameters_of(model).total
    return lora_parameters(model, setup.rank, setup.targets)


def logits_bytes(model: Architecture, setup: Setup, recipe: Recipe) -> float:
    """What the head and the loss need at once."""
    tokens, size = setup.token_budget, setup.dtype_bytes
    if recipe.head == "naive":
        return NAIVE_LOGITS_BYTES * tokens * model.vocabulary
    if recipe.head == "chunked":
        return CHUNKED_LOGITS_BYTES * tokens * model.vocabulary
    positions = min(HEAD_POSITIONS, tokens)
    hidden = 2 * tokens * model.hidden * size
    return positions * model.vocabulary * (2 * 4 + size) + hidden


def host_bytes(model: Architecture, setup: Setup, recipe: Recipe, *, publishes: bool) -> float:
    """Host memory of one rank: the process, what is offloaded, and what is on its way to the store.

    An adapter's weights are in float32 on the rank that publishes, twice: gathered, and as a file.
    In full fine-tuning each rank writes its own part of the state, of which it has a copy unless
    that is offloaded.
    """
    own = held_bytes(model, setup, recipe)
    offloaded = own.total - own.on_gpu(setup, recipe).total
    if not setup.trains_adapter:
        copied = 0 if setup.is_offloaded else own.weights + own.moments
        published = copied + 2 * STATE_FILE_BYTES
    else:
        published = 8 * trained_parameters(model, setup) if publishes else 0
    return PROCESS_BYTES + offloaded + published


def unit_bytes(model: Architecture, setup: Setup) -> float:
    """The weights of one block as they are gathered."""
    counts = parameters_of(model)
    if setup.method != "qlora":
        return counts.block * setup.dtype_bytes
    linear = counts.linear // model.num_layers
    return linear * NF4_BYTES + (counts.block - linear) * setup.dtype_bytes


def largest_unit(model: Architecture, setup: Setup, recipe: Recipe) -> GatheredUnit | None:
    """What is gathered at once: two of it can be there, and no plan fits where they do not."""
    if not _is_gathered(setup, recipe):
        return None
    counts, block = parameters_of(model), unit_bytes(model, setup)
    if _trains_tables(setup, recipe):
        name, tables = "embedding and head", counts.tables * setup.dtype_bytes
    else:
        # A table that is the head too is whole on every rank.
        name, tables = "the embedding", 0 if model.is_tied else counts.table * setup.dtype_bytes
    if block >= tables:
        return GatheredUnit(name="a block", size_bytes=round(block))
    return GatheredUnit(name=name, size_bytes=tables)


def _moment(
    recipe: Recipe,
    phase: Phase,
    own: HeldBytes,
    gradients: float,
    *,
    activations: float = 0,
    logits: float = 0,
    gathered: float = 0,
) -> Moment:
    parameters = own.quant_state + own.frozen + own.weights
    optimizer = own.moments + (own.update if phase == "update" else 0)
    used = parameters + gradients + optimizer + activations + logits + gathered
    return Moment(
        phase=phase,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        gathered=gathered,
        overhead=used * recipe.slack + recipe.context_bytes,
    )


def _kept_bytes(model: Architecture, setup: Setup, recipe: Recipe) -> float:
    """Activations between forward and backward."""
    if recipe.offloads_activations:
        return 0
    if setup.is_checkpointed:
        return checkpoint_bytes(model, setup)
    return model.num_layers * block_bytes(model, setup, recipe)


def _is_gathered(setup: Setup, recipe: Recipe) -> bool:
    """A rank computes with other tensors than those it holds."""
    casts = setup.method == "full" and recipe.trained_bytes != setup.dtype_bytes
    return setup.num_shards > 1 or setup.is_offloaded or casts


def _trains_tables(setup: Setup, recipe: Recipe) -> bool:
    """Whether embedding and head are one unit, as Offbeat makes them where it trains them."""
    return recipe.keeps_head and not setup.trains_adapter


def _tables_bytes(model: Architecture, setup: Setup, recipe: Recipe) -> float:
    """Embedding and head that stay gathered: a shared table always does, and both do where they
    are one unit with what computes the loss."""
    counts = parameters_of(model)
    if recipe.gathers_tables_for_good or model.is_tied or _trains_tables(setup, recipe):
        return counts.tables * setup.dtype_bytes
    return counts.table * setup.dtype_bytes if recipe.keeps_head else 0


def _gathered_at_head(model: Architecture, setup: Setup, recipe: Recipe) -> float:
    table = parameters_of(model).table * setup.dtype_bytes
    gradient = table if setup.method == "full" else 0
    if not _is_gathered(setup, recipe):
        return 0 if recipe.keeps_gradients else gradient
    return (_tables_bytes(model, setup, recipe) or table) + gradient


def _gathered_in_backward(model: Architecture, setup: Setup, recipe: Recipe) -> float:
    counts = parameters_of(model)
    largest = max(inputs * outputs for inputs, outputs in model.linears.values())
    dequantised = largest * setup.dtype_bytes if setup.method == "qlora" else 0
    if not _is_gathered(setup, recipe):
        return dequantised
    gathered = _tables_bytes(model, setup, recipe) + UNITS_GATHERED * unit_bytes(model, setup)
    if setup.method == "full":
        gathered += counts.block * (setup.dtype_bytes + recipe.reduce_bytes)
    return gathered + dequantised
