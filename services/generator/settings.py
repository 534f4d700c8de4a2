"""What a generator process reads from its environment."""

from typing import Annotated

from pydantic import Field

from offbeat.settings import ObjectStoreSettings, QueueSettings, WorkerSettings


class GeneratorSettings(WorkerSettings):
    """`OFFBEAT_*`; the number of threads is torch's own `OMP_NUM_THREADS`."""

    sequences_max: Annotated[int, Field(ge=1)] = 64
    """Samples decoded at once; a GPU with room for more is faster with more."""
    adapters_max: Annotated[int, Field(ge=0)] = 2
    """Superseded versions of a run that stay loaded, for evaluations."""
    models_max: Annotated[int, Field(ge=1)] = 1
    """Base models held at once; a run on another model closes the one used longest ago."""
    store: ObjectStoreSettings = Field(default_factory=ObjectStoreSettings)
    queue: QueueSettings = Field(default_factory=QueueSettings)
