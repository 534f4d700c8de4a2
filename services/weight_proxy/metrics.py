"""What the weight-proxy counts for Prometheus, in a registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "offbeat_weight_proxy"


class Metrics:
    """The series of one application; nothing is shared between two in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.publishes = Counter(
            f"{PREFIX}_publishes", "Versions that became visible.", registry=self.registry
        )
        self.conflicts = Counter(
            f"{PREFIX}_conflicts", "Publishes of a version taken before.", registry=self.registry
        )
        self.waiters = Gauge(f"{PREFIX}_waiters", "Long-polls that wait.", registry=self.registry)
        self.served_bytes = Counter(
            f"{PREFIX}_served_bytes", "Bytes of files sent to readers.", registry=self.registry
        )
        self.store_reads = Counter(
            f"{PREFIX}_store_reads", "Files read from the object store.", registry=self.registry
        )
        self.verify_s = Histogram(
            f"{PREFIX}_publish_verify_seconds",
            "Time to check the objects of a publish.",
            registry=self.registry,
        )
