"""How a run is trained, as far as memory and speed depend on it: the levers of a plan."""

from dataclasses import dataclass
from typing import Literal

from offbeat.contracts.plan import Method

Head = Literal["fused", "chunked", "naive"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What differs from run to run."""

    method: Method
    token_budget: int
    """Tokens that a rank forwards at once."""
    is_checkpointed: bool
    """Activations of a block are computed again in its backward."""
    num_shards: int = 1
    """Ranks that share one copy of the model."""
    is_offloaded: bool = False
    """Parameters, gradients and optimizer states lie on the host, where the update is made too."""
    rank: int = 16
    targets: frozenset[str] = frozenset()
    """The projections that carry LoRA."""
    has_dropout: bool = False
    dtype_bytes: int = 2
    """Of the arithmetic, and of the frozen weights."""
    visible_pairs: int = 0
    """Pairs of a query and a key whose attention weight is kept for the backward, where the
    attention is no fused kernel; per head."""

    @property
    def trains_adapter(self) -> bool:
        """Whether the base model is frozen."""
        return self.method != "full"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What differs from trainer to trainer: Offbeat's, and those of the programs whose published
    measurements the formula reproduces."""

    head: Head = "fused"
    base_bytes: int | None = None
    """Of a frozen weight, where it is kept in another type than that of the arithmetic."""
    trained_bytes: int = 4
    """Of a trained weight: a float32 master."""
    copy_bytes: int = 2
    """Of the copy of an adapter weight that the model computes with."""
    gradient_bytes: int = 4
    moment_bytes: int = 8
    """Both moments of AdamW."""
    update_bytes: int = 16
    """What an update of an adapter makes beside the old state: clipped gradients, a new state."""
    reduce_bytes: int = 4
    """Of a gradient on its way to the other ranks, in full fine-tuning."""
    keeps_gradients: bool = True
    """Gradients of earlier micro-batches are there when the next one is forwarded."""
    updates_in_backward: bool = False
    """Every gradient is used up as soon as it is there."""
    moments_are_paged: bool = False
    offloads_activations: bool = False
    is_compiled: bool = False
    gathers_tables_for_good: bool = False
    """Embedding and head belong to the root, which stays gathered through forward and backward."""
    keeps_head: bool = False
    """Every rank has the whole head, from the beginning."""
    keeps_adapter: bool = False
    """Every rank has the whole adapter and the sums of its gradient; one of them the masters and
    moments too."""
    adapter_input_bytes: int = 0
    """Of the copy that an adapter makes of its input, where it computes in a type of its own."""
    shards_quant_state: bool = False
    """The constants of a quantisation are sharded with the weights. Those of bitsandbytes are not
    parameters, so every rank has all of them, also when the parameters are offloaded."""
    quant_state_bytes: float = 1 / 64 + 4 / (64 * 256)
    """A byte for every 64 weights, a float32 for every 256 of those (double quantisation)."""
    slack: float = 0.08
    """Memory that the allocator holds and nobody uses, as a share (reference: 5 to 10 %)."""
    context_bytes: int = 1_500_000_000
    """CUDA's context and NCCL's buffers: 1 to 2 GB."""


OFFBEAT = Recipe(keeps_head=True, keeps_adapter=True)
