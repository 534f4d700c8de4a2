"""`make gpu-check`: what one GPU does with Offbeat, in less than ten minutes and without network.

    python -m scripts.gpu_check [--data-dir .offbeat] [--vllm-python PYTHON] [--dry-run]

A short GRPO run of SmolLM2-135M through all the real parts, vLLM and the trainer sharing the GPU.
What was measured is printed and written to `<data-dir>/gpu-check.json`: how soon versions are in
use, the trainer's tokens/s and its share of the GPU's peak (MFU), and the memory it took beside
what `offbeat plan` says. Without a vLLM's Python the transformers engine samples. Without a GPU, or
with `--dry-run`, everything runs on the CPU, to see that the check itself works; the vLLM is one
for CPUs then.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from offbeat.client import OffbeatClient
from offbeat.contracts.plan import PlanOptions
from offbeat.contracts.run_spec import ModelSection, RunSpec
from offbeat.contracts.runs import MetricSeries, RunEvent, RunStatus
from offbeat.errors import OffbeatError
from offbeat.models import resolve_model
from offbeat.plan.gpus import CARDS
from offbeat.plan.known_models import architecture_of
from offbeat.plan.report import make_plan
from offbeat.specs import validate_spec
from scripts.bench.machine import machine
from scripts.bench.matmul import Layers, step_flops
from scripts.bench.scale_meter import rss_bytes
from scripts.demo import seconds_until_served, values_of
from scripts.processes import StackError, interrupt_on_signals
from scripts.smoke import gain
from scripts.stack import Stack, StackOptions, running_stack

MODEL = "smollm2-135m-instruct"
PROMPT_TOKENS = 48
"""Of the longest prompt."""
RUN_TIMEOUT_S = 420.0
"""Of the ten minutes; the rest is for starting vLLM."""
POLL_S = 1.0
WARM_UP_STEPS = 1
"""Left out of the rates: kernels are compiled and caches filled in it."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained."""

    steps: int
    groups: int
    group_size: int
    new_tokens: int


GPU_SIZE = Size(steps=20, groups=32, group_size=16, new_tokens=64)
DRY_SIZE = Size(steps=2, groups=2, group_size=4, new_tokens=16)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """`gpu-check.json`."""

    device: str
    engine: str
    steps: int
    wall_s: float
    reward_first: float
    reward_last: float
    publish_to_served_s: float | None
    """Median, from the manifest's acceptance to the first job that may use the version."""
    step_s: float
    trained_tokens_per_s: float
    """Completion tokens."""
    forwarded_tokens_per_s: float
    """All tokens that pass through the model, padding included."""
    mfu: float | None
    """Share of the card's peak of dense bfloat16 products; none for an unknown card or a CPU."""
    planned_bytes: int | None
    """Of the trainer's GPU memory, by `offbeat plan`."""
    measured_bytes: int
    """The most that the trainer's process held: of the GPU's memory, or of the CPU's."""


def spec_of(size: Size) -> RunSpec:
    """The run."""
    terms = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    return validate_spec(
        {
            "name": "gpu-check",
            "model": {"id": MODEL},
            "data": {
                "source": "reasoning_gym",
                "size": 500,
                "tasks": [{"name": "chain_sum", "config": terms}],
            },
            "rewards": [{"type": "reasoning_gym", "extract": "last_number"}],
            "rollout": {
                "group_size": size.group_size,
                "groups_per_step": size.groups,
                "max_new_tokens": size.new_tokens,
            },
            "train": {"steps": size.steps, "learning_rate": 3e-4},
            "staleness": {"max_versions": 1},
        }
    )


def card_of(device: str) -> str | None:
    """The name under which plans know a card, as CUDA names it."""
    words = device.replace("-", " ").split()
    known = [name for name in CARDS if all(word in words for word in name.split("-"))]
    return max(known, key=len) if known else None


def figures(
    *,
    device: str,
    engine: str,
    spec: RunSpec,
    metrics: MetricSeries,
    events: Sequence[RunEvent],
    wall_s: float,
    layers: Layers,
    measured_bytes: int,
) -> Figures:
    """The figures of a run that has succeeded."""
    steps = values_of(metrics, "perf/step_s")[WARM_UP_STEPS:]
    step_s = median(steps)
    forwarded = median(values_of(metrics, "batch/forwarded_tokens_per_step")[WARM_UP_STEPS:])
    trained_rate = median(values_of(metrics, "perf/trained_tok_s")[WARM_UP_STEPS:])
    flops = step_flops(
        layers,
        rank=spec.adapter.rank,
        forwarded_tokens=round(forwarded),
        # Groups without variance count as trained, and are not forwarded.
        scored_tokens=round(min(trained_rate * step_s, forwarded)),
    )
    card = card_of(device)
    peak = CARDS[card].flops_per_s if card else None
    rewards = values_of(metrics, "reward")
    first, last = gain(rewards)
    return Figures(
        device=device,
        engine=engine,
        steps=len(rewards),
        wall_s=wall_s,
        reward_first=first,
        reward_last=last,
        publish_to_served_s=seconds_until_served(events),
        step_s=step_s,
        trained_tokens_per_s=trained_rate,
        forwarded_tokens_per_s=forwarded / step_s,
        mfu=flops / step_s / peak if peak else None,
        planned_bytes=_planned_bytes(spec, card) if card else None,
        measured_bytes=measured_bytes,
    )


def _planned_bytes(spec: RunSpec, card: str) -> int:
    options = PlanOptions(prompt_tokens=PROMPT_TOKENS)
    return make_plan(architecture_of(MODEL), spec, f"1x{card}", 1, options).memory.total


class MemoryWatch:
    """The most memory that a process has held, looked at now and then."""

    def __init__(self, read_bytes: Callable[[], int]) -> None:
        self._read_bytes = read_bytes
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="memory-watch", daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stopping.wait(POLL_S):
            self.peak_bytes = max(self.peak_bytes, self._read_bytes())


def gpu_bytes(pid: int) -> int:
    """What a process holds of the GPU's memory, CUDA's context included."""
    listed = subprocess.run(
        (
            "nvidia-smi",
            "--query-compute-apps=pid,used_gpu_memory",
            "--format=csv,noheader,nounits",
        ),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = [line.split(",") for line in listed.splitlines()]
    return sum(int(mib) * 2**20 for owner, mib in rows if int(owner) == pid)


def run_check(options: StackOptions, spec: RunSpec, *, is_dry: bool) -> Figures:
    """Run it on a stack of its own. Raises `StackError` where it does not succeed."""
    device = "cpu" if is_dry else torch.cuda.get_device_name()
    with running_stack(options, sys.stdout) as stack:
        trainer = stack.process("trainer-1").pid
        held = rss_bytes if is_dry else gpu_bytes
        began = time.monotonic()
        with (
            OffbeatClient(stack.addresses.orchestrator) as client,
            MemoryWatch(lambda: held(trainer)) as memory,
        ):
            run_id = _trained(stack, client, spec)
            metrics, events = client.metrics(run_id), list(client.iter_events(run_id))
        wall_s = time.monotonic() - began
    folder = resolve_model(ModelSection(id=MODEL), options.model_cache, None)
    return figures(
        device=device,
        engine="vllm" if options.vllm_python else "transformers",
        spec=spec,
        metrics=metrics,
        events=events,
        wall_s=wall_s,
        layers=Layers.of_llama(folder),
        measured_bytes=memory.peak_bytes,
    )


def _trained(stack: Stack, client: OffbeatClient, spec: RunSpec) -> str:
    run_id = client.submit(spec).id
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not (run := client.run(run_id)).status.is_final:
        stack.watch()
        if time.monotonic() > deadline:
            raise StackError(f"step {run.progress.step} after {RUN_TIMEOUT_S:.0f} s: too slow")
        time.sleep(POLL_S)
    if run.status != RunStatus.SUCCEEDED:
        raise StackError(f"the run has {run.status}: {run.status_reason}")
    return run_id


def settings_of(*, is_dry: bool) -> Mapping[str, str]:
    """vLLM and the trainer share the card, or in a dry run, which keeps off it, main memory."""
    if is_dry:
        return {"OFFBEAT_DEVICE": "cpu", "OFFBEAT_VLLM_ARGS": "--gpu-memory-utilization 0.2"}
    return {"OFFBEAT_VLLM_ARGS": "--gpu-memory-utilization 0.4"}


def main() -> int:
    """Check, print, write."""
    parser = argparse.ArgumentParser(description="Measure a short run on one GPU.")
    parser.add_argument("--data-dir", type=Path, default=Path(".offbeat"))
    parser.add_argument("--vllm-python", type=Path, help="of the environment with vLLM")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, very small")
    arguments = parser.parse_args()
    is_dry = arguments.dry_run or not torch.cuda.is_available()
    options = StackOptions(
        data_dir=arguments.data_dir / "gpu-check",
        vllm_python=arguments.vllm_python,
        settings=settings_of(is_dry=is_dry),
    )
    interrupt_on_signals()
    try:
        found = run_check(options, spec_of(DRY_SIZE if is_dry else GPU_SIZE), is_dry=is_dry)
    except (OffbeatError, StackError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    report = {"dry_run": is_dry, **machine(), **asdict(found)}
    text = json.dumps(report, indent=2)
    (arguments.data_dir / "gpu-check.json").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
