"""`make bench-nodes`: a trainer of two machines, with a slow link between them, one of them lost.

    sudo make bench-nodes        # on the module: [--data-dir .offbeat] [--steps 8] [--mbit 100]

The second machine is a network namespace; the services and rank 0 are in the first. Three runs of
the same spec: over a link as fast as memory, over the slow one, and over the slow one while the
second machine is killed. The figures are printed, and written to `<data-dir>/bench/nodes.json`.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from offbeat.client import OffbeatClient
from offbeat.contracts.run_spec import RunSpec
from offbeat.specs import load_spec
from scripts.bench.contender import thread_limits
from scripts.bench.link import ADDRESSES, Link, linked
from scripts.bench.machine import machine
from scripts.parts import free_port
from scripts.processes import end, interrupt_on_signals
from scripts.stack import Stack, StackOptions, running_stack

EXAMPLE = Path("examples/sft.toml")
RUN_TIMEOUT_S = 1200.0
LOST_AT_STEP = 3
WATCH_S = 0.2


@dataclass(frozen=True, kw_only=True)
class NodesFigures:
    """One run."""

    link: str
    step_s: float
    """Median time from a version to the next, after the first two."""
    link_mb_per_step: float
    """Both directions, in the same steps; of what a lost machine costs too."""
    starts: int
    """Of the trainer's ranks."""
    adapter_sha256: str


class Nodes:
    """The trainer's two machines, with torchrun on each, started again when one has ended."""

    def __init__(self, stack: Stack, link: Link, log: Path) -> None:
        self._stack = stack
        self._link = link
        self._log = log
        self._stopping = threading.Event()
        self._running: list[subprocess.Popen[bytes]] = []
        self.starts = 0
        self._thread = threading.Thread(target=self._supervise, name="supervisor")
        self._thread.start()

    def stop(self) -> None:
        """End both."""
        self._stopping.set()
        self._thread.join()

    def _supervise(self) -> None:
        """What a JobSet does on Kubernetes: a node that ends takes the other with it."""
        while not self._stopping.is_set():
            port = free_port()
            self._running = [self._start(node, port) for node in range(len(ADDRESSES))]
            self.starts += 1
            while not self._stopping.wait(WATCH_S):
                if any(process.poll() is not None for process in self._running):
                    break
            end(self._running)

    def _start(self, node: int, port: int) -> subprocess.Popen[bytes]:
        own = {
            **thread_limits(max(1, (os.cpu_count() or 1) // len(ADDRESSES))),
            "GLOO_SOCKET_IFNAME": self._link.interface(node),
            "OFFBEAT_WORKER_ID": "trainer",
            "OFFBEAT_DATA_DIR": str(self._stack.options.data_dir / f"node-{node}"),
            "OFFBEAT_MODEL_CACHE_DIR": str(self._stack.options.model_cache),
        }
        command = (
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
            *(f"--node-rank={node}", f"--master-addr={ADDRESSES[0]}", f"--master-port={port}"),
            *("-m", "services.trainer"),
        )
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._link.command(node, command),
                env={**os.environ, **self._stack.environment(), **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@contextmanager
def nodes(stack: Stack, link: Link, log: Path) -> Iterator[Nodes]:
    """Started, and stopped in the end."""
    running = Nodes(stack, link, log)
    try:
        yield running
    finally:
        running.stop()


def measure(stack: Stack, spec: RunSpec, mbit_per_s: int | None, *, loses: bool) -> NodesFigures:
    """One run from its first version to its last."""
    published: list[tuple[float, int]] = []
    adapter_sha256 = ""
    log = stack.options.logs / "trainer-nodes.log"
    with (
        linked(mbit_per_s) as link,
        nodes(stack, link, log) as running,
        OffbeatClient(stack.addresses.orchestrator) as client,
    ):
        run_id = client.submit(spec).id
        for event in client.stream_events(run_id):
            if event.kind != "version_published":
                continue
            published.append((time.monotonic(), link.moved_bytes))
            adapter_sha256 = str(event.data["adapter_sha256"])
            print(f"    version {event.data['version']}", flush=True)
            if loses and event.data["version"] == LOST_AT_STEP:
                link.lose()
        client.wait(run_id, timeout_s=RUN_TIMEOUT_S)
        starts = running.starts
    counted = published[2:]
    rate = "as fast as memory" if mbit_per_s is None else f"{mbit_per_s} Mbit/s"
    return NodesFigures(
        link=f"{rate}, a machine lost" if loses else rate,
        step_s=median(after[0] - before[0] for before, after in pairwise(counted)),
        link_mb_per_step=(counted[-1][1] - counted[0][1]) / (len(counted) - 1) / 1e6,
        starts=starts,
        adapter_sha256=adapter_sha256,
    )


def main() -> int:
    """Take the three runs, and say whether they made the same adapter."""
    parser = argparse.ArgumentParser(description="Train on two machines with a slow link.")
    parser.add_argument("--data-dir", type=Path, default=Path(".offbeat"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--mbit", type=int, default=100)
    arguments = parser.parse_args()
    interrupt_on_signals()
    folder: Path = arguments.data_dir / "bench" / "nodes"
    example = load_spec(EXAMPLE)
    train = example.train.model_copy(update={"steps": arguments.steps})
    spec = example.model_copy(update={"train": train})
    options = StackOptions(data_dir=folder, generators=0, trainers=0)
    measured: list[NodesFigures] = []
    with running_stack(options, sys.stdout) as stack:
        for mbit_per_s, loses in ((None, False), (arguments.mbit, False), (arguments.mbit, True)):
            one = measure(stack, spec, mbit_per_s, loses=loses)
            measured.append(one)
            print(f"  {one.link}: {one.step_s:.1f} s and {one.link_mb_per_step:.1f} MB a step")
    figures = {**machine(), "runs": [asdict(one) for one in measured]}
    (folder.parent / "nodes.json").write_text(json.dumps(figures, indent=2) + "\n")
    is_same = len({one.adapter_sha256 for one in measured}) == 1
    print(f"  {'the same adapter' if is_same else 'ANOTHER ADAPTER'} in all runs")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
