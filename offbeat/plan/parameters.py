"""How many parameters of which kind a model has, and how many of them are trained.

Biases and the norms within attention heads are left out: below 0.01 % of any model.
"""

from dataclasses import dataclass

from offbeat.plan.architecture import MLP_LINEARS, Architecture


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Counts over the whole model."""

    linear: int
    """In the projections of the blocks: what a quantisation makes smaller."""
    block: int
    """In one block, with its norms: what is gathered at once."""
    table: int
    """In the embedding."""
    tables: int
    """In the embedding and a head of its own."""
    total: int
    active: int
    """That take part in the forward of one token: of the experts, only those it is sent to."""


def parameters_of(model: Architecture) -> Parameters:
    """Count them."""
    sizes = {name: inputs * outputs for name, (inputs, outputs) in model.linears.items()}
    attention = sum(size for name, size in sizes.items() if name not in MLP_LINEARS)
    expert = sum(size for name, size in sizes.items() if name in MLP_LINEARS)
    router = model.hidden * model.num_experts if model.num_experts > 1 else 0
    linear = attention + expert * model.num_experts
    block = linear + router + 2 * model.hidden
    table = model.vocabulary * model.hidden
    tables = table if model.is_tied else 2 * table
    used = attention + router + expert * model.experts_per_token
    return Parameters(
        linear=linear * model.num_layers,
        block=block,
        table=table,
        tables=tables,
        total=block * model.num_layers + tables + model.hidden,
        active=used * model.num_layers + table,
    )


def lora_targets(model: Architecture, target_modules: str | tuple[str, ...]) -> frozenset[str]:
    """The projections that carry LoRA. Experts never do: engines lay them out differently."""
    names = frozenset(model.linears)
    if isinstance(target_modules, tuple):
        names &= {name.rsplit(".", 1)[-1] for name in target_modules}
    return names - MLP_LINEARS if model.num_experts > 1 else names


def lora_parameters(model: Architecture, rank: int, targets: frozenset[str]) -> int:
    """r (in + out) for every adapted projection."""
    widths = (sum(model.linears[name]) for name in targets)
    return rank * model.num_layers * sum(widths)
