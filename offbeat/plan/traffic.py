"""Bytes that move for one optimizer step.

Where every node holds a whole copy of the model, only what is trained crosses between nodes, once a
step: its gradient to rank 0, and an adapter's new weights back. (Twice more in the rare step that
changes the canary's answer.) Where a copy is spread over several, all weights do, for every
micro-batch.
"""

from offbeat.contracts.plan import PlanTraffic
from offbeat.plan.architecture import Architecture
from offbeat.plan.choice import Choice
from offbeat.plan.gpus import Cluster
from offbeat.plan.memory import trained_parameters
from offbeat.plan.setup import OFFBEAT
from offbeat.plan.speed import moved_bytes


def traffic_of(model: Architecture, choice: Choice, cluster: Cluster) -> PlanTraffic:
    """The bytes of one step, and the seconds that the slow part of them takes."""
    setup, micro_batches = choice.setup, choice.micro_batches
    trained = trained_parameters(model, setup)
    weights = micro_batches * moved_bytes(model, setup)
    state_bytes = OFFBEAT.trained_bytes + OFFBEAT.moment_bytes
    between = 0.0
    if choice.sharding == "across nodes":
        between = weights
    elif cluster.num_nodes > 1 and setup.trains_adapter:
        between = (OFFBEAT.gradient_bytes + OFFBEAT.copy_bytes) * trained
    elif cluster.num_nodes > 1:
        # A ring: every node sends and receives each gradient twice, but for its own share.
        between = 2 * (1 - 1 / cluster.num_nodes) * OFFBEAT.gradient_bytes * trained
    return PlanTraffic(
        micro_batches=micro_batches,
        within_node_bytes=round(weights) if choice.sharding == "within nodes" else 0,
        between_nodes_bytes=round(between),
        between_nodes_s=between / cluster.link_bytes_per_s,
        published_bytes=trained * (setup.dtype_bytes if setup.trains_adapter else state_bytes),
    )
