"""What would make a run fit that does not, the cheapest first.

In this order: activation checkpointing, CPU offload, LoRA for full fine-tuning, QLoRA, a smaller
token budget, more nodes. Each is tried alone; where no one does, they are added up.
"""

from collections.abc import Sequence
from dataclasses import replace

from offbeat.contracts.plan import Remedy
from offbeat.plan.architecture import Architecture
from offbeat.plan.choice import choose
from offbeat.plan.gpus import Cluster
from offbeat.plan.wanted import Wanted

NODES_MAX = 64
"""Nodes that a remedy may ask for."""


def remedies(model: Architecture, wanted: Wanted, cluster: Cluster) -> tuple[Remedy, ...]:
    """Every single change with which the run fits; where there is none, the fewest together."""
    tried = [_remedy(name, model, changed, cluster) for name, changed in _changes(wanted)]
    alone = [remedy for remedy in tried if remedy.verdict != "does not fit"]
    if more := _on_more_nodes((), model, wanted, cluster):
        alone.append(more)
    return tuple(alone) or _together(model, wanted, cluster)


def _changes(wanted: Wanted) -> list[tuple[str, Wanted]]:
    """The changes that are left to make, each on its own."""
    changes: list[tuple[str, Wanted]] = []
    if wanted.is_checkpointed is False:
        changes.append(("gradient checkpointing", replace(wanted, is_checkpointed=True)))
    if wanted.is_offloaded is False:
        changes.append(("offload to the CPU", replace(wanted, is_offloaded=True)))
    if wanted.method == "full":
        changes.append(("LoRA in place of full fine-tuning", replace(wanted, method="lora")))
    if wanted.method != "qlora":
        changes.append(('QLoRA (quantization = "nf4")', replace(wanted, method="qlora")))
    if wanted.token_budget is not None and wanted.token_budget > wanted.sequence_tokens:
        changes.append(('token_budget = "auto"', replace(wanted, token_budget=None)))
    return changes


def _together(model: Architecture, wanted: Wanted, cluster: Cluster) -> tuple[Remedy, ...]:
    """Change after change, each on top of those before, until the run fits."""
    names: list[str] = []
    while changes := _changes(wanted):
        name, wanted = changes[0]
        names.append(name)
        remedy = _remedy(", ".join(names), model, wanted, cluster)
        if remedy.verdict != "does not fit":
            return (remedy,)
        if more := _on_more_nodes(names, model, wanted, cluster):
            return (more,)
    return ()


def _on_more_nodes(
    names: Sequence[str], model: Architecture, wanted: Wanted, cluster: Cluster
) -> Remedy | None:
    """These changes on the fewest nodes of the same kind, in powers of two, with which it fits."""
    nodes = cluster.num_nodes * 2
    while nodes <= NODES_MAX:
        larger = replace(cluster, num_nodes=nodes)
        change = ", ".join([*names, f"{nodes} nodes ({larger.num_gpus} GPUs)"])
        remedy = _remedy(change, model, wanted, larger)
        if remedy.verdict != "does not fit":
            return remedy
        nodes *= 2
    return None


def _remedy(change: str, model: Architecture, wanted: Wanted, cluster: Cluster) -> Remedy:
    choice = choose(model, wanted, cluster)
    return Remedy(change=change, gpu_bytes=round(choice.peak.total), verdict=choice.verdict)
