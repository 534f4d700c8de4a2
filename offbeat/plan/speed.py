"""Seconds for a step, as a sum of what cannot overlap.

compute     2 floating-point operations a parameter and token forward, twice that backward, half
            of it where the weights are frozen; once more forward with checkpointing
elementwise what is not a matrix product moves activations through the GPU's memory; compiled
            programs fuse it away
gather      weights from the other ranks, while the GPU computes: only the longer of both counts
host        weights and gradients to and from the host's memory, and AdamW there
"""

from dataclasses import dataclass

from offbeat.plan.activations import block_bytes
from offbeat.plan.architecture import Architecture
from offbeat.plan.gpus import Cluster
from offbeat.plan.memory import held_bytes, unit_bytes
from offbeat.plan.parameters import parameters_of
from offbeat.plan.setup import Recipe, Setup

ACTIVATION_PASSES = 12
"""Times that a kept byte moves, forward and backward: fitted to torchtune's step from 7,075 to
8,998 tokens a second by compiling."""
FLOPS_PER_S = 100e12
"""Of a card of which only the memory is known: enough to compare settings, and never shown."""
HOST_MEMORY_BYTES_PER_S = 200e9
"""Of a server: AdamW on the CPU is bound by it."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds, on every rank at once."""

    compute_s: float
    gather_s: float
    transfer_s: float
    """To and from the host. This and the two above are a micro-batch's."""
    update_s: float
    """On the host; on a GPU it is not worth counting."""

    def step_s(self, micro_batches: int) -> float:
        """Gathering hides behind computing, or the other way round."""
        a_batch_s = max(self.compute_s, self.gather_s) + self.transfer_s
        return micro_batches * a_batch_s + self.update_s


def step_time(
    model: Architecture,
    setup: Setup,
    recipe: Recipe,
    cluster: Cluster,
    *,
    sequence_tokens: int,
) -> StepTime:
    """What a step's parts take."""
    gpu = cluster.gpu
    flops_per_s = gpu.flops_per_s or FLOPS_PER_S
    operations = flops_per_token(model, setup, sequence_tokens) * setup.token_budget
    compute_s = operations / (flops_per_s * gpu.reached)
    if not recipe.is_compiled:
        kept = model.num_layers * block_bytes(model, setup, recipe)
        compute_s += ACTIVATION_PASSES * kept / gpu.memory_bytes_per_s
    return StepTime(
        compute_s=compute_s,
        gather_s=_gather_s(model, setup, cluster),
        transfer_s=_transfer_s(model, setup, cluster),
        update_s=_update_s(model, setup, recipe, cluster),
    )


def flops_per_token(model: Architecture, setup: Setup, sequence_tokens: int) -> float:
    """Operations for a token, forward and backward; half of a causal sequence is visible to it."""
    attended = 2 * model.num_layers * model.query_width * sequence_tokens
    forward = 2 * parameters_of(model).active + attended
    passes = 3 if setup.method == "full" else 2
    return forward * (passes + setup.is_checkpointed)


def streamed_bytes(model: Architecture, setup: Setup) -> float:
    """All weights as they are gathered, forward and again backward, and in full fine-tuning as many
    gradients."""
    passes = 3 if setup.method == "full" else 2
    tables = parameters_of(model).tables * setup.dtype_bytes
    return passes * (model.num_layers * unit_bytes(model, setup) + tables)


def moved_bytes(model: Architecture, setup: Setup) -> float:
    """What a rank receives from the others for one micro-batch."""
    return streamed_bytes(model, setup) * (1 - 1 / setup.num_shards)


def _gather_s(model: Architecture, setup: Setup, cluster: Cluster) -> float:
    is_slow = setup.num_shards > cluster.gpus_per_node
    link = cluster.link_bytes_per_s if is_slow else cluster.gpu.link_bytes_per_s
    return moved_bytes(model, setup) / link


def _transfer_s(model: Architecture, setup: Setup, cluster: Cluster) -> float:
    if not setup.is_offloaded:
        return 0
    return streamed_bytes(model, setup) / setup.num_shards / cluster.gpu.host_bytes_per_s


def _update_s(model: Architecture, setup: Setup, recipe: Recipe, cluster: Cluster) -> float:
    stays = recipe.keeps_adapter and setup.trains_adapter
    if not setup.is_offloaded or stays:
        return 0
    own = held_bytes(model, setup, recipe)
    states = own.gradients + own.moments + (own.weights if setup.method == "full" else 0)
    # AdamW reads all of it and writes all but the gradients, in a memory that all ranks share.
    a_rank = 2 * states - own.gradients
    return a_rank * min(setup.num_shards, cluster.gpus_per_node) / HOST_MEMORY_BYTES_PER_S
