"""What a trainer process reads from its environment."""

from pydantic import Field

from offbeat.settings import ObjectStoreSettings, QueueSettings, WorkerSettings


class TrainerSettings(WorkerSettings):
    """`OFFBEAT_*`; the number of threads is torch's own `OMP_NUM_THREADS`."""

    store: ObjectStoreSettings = Field(default_factory=ObjectStoreSettings)
    queue: QueueSettings = Field(default_factory=QueueSettings)
