"""What a trainer process reads from its environment."""

from typing import Annotated

from pydantic import Field

from offbeat.settings import WorkerSettings


class TrainerSettings(WorkerSettings):
    """`OFFBEAT_*`; the number of threads is torch's own `OMP_NUM_THREADS`.

    Started by torchrun, one process for each GPU, the ranks are one trainer.
    """

    shard_ranks: Annotated[int, Field(ge=1)] | None = None
    """How many ranks hold one copy of the base model together: by default all of a machine. A
    multiple of that, where one machine cannot hold it; between machines the parts of the model then
    cross the network in every micro-batch."""
    cpu_offload: bool = False
    """Keep the base model in host memory and bring a block at a time to the GPU."""
    rank_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long a rank waits for the others within a computation before it takes them for dead."""
