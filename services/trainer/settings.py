"""What a trainer process reads from its environment."""

from offbeat.settings import WorkerSettings


class TrainerSettings(WorkerSettings):
    """`OFFBEAT_*`; the number of threads is torch's own `OMP_NUM_THREADS`."""
