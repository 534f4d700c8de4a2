"""`make demo`: start the real parts, submit a run with the CLI, watch it learn, show what came of
it.

Everything lies under the data folder: `demo/summary.json`, `demo/adapter/` and one log a process.
What a number means is said where it is computed, in `summarise`.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offbeat.client import OffbeatClient
from offbeat.contracts.runs import MetricSeries, RolloutView, RunEvent
from offbeat.models import resolve_model
from offbeat.specs import load_spec
from scripts.parts import program
from scripts.processes import StackError, interrupt_on_signals
from scripts.stack import Stack, StackOptions, running_stack

EXAMPLE = Path("examples/chain_sum.toml")
SAMPLES_SHOWN = 3
LOADING = """\
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained("{model}")
    model = PeftModel.from_pretrained(base, "{adapter}")
"""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """`summary.json`."""

    run_id: str
    steps: int
    reward_first2: float
    reward_last5: float
    eval_before: float
    eval_after: float
    wall_s: float
    tokens_generated: int
    staleness_mean: float
    staleness_max: float
    publish_to_served_p50_s: float | None
    trainer_idle_fraction: float
    ratio_staleness_0: float | None
    adapter_path: str


def summarise(
    *,
    run_id: str,
    metrics: MetricSeries,
    events: Sequence[RunEvent],
    details: dict[str, object],
    wall_s: float,
    adapter_path: Path,
) -> Summary:
    """The numbers of a finished run. `eval_*` is greedy accuracy on the held-out prompts; `wall_s`
    is from the submission to the end of the run; `trainer_idle_fraction` counts only the time in
    which a step could have been under way."""
    rewards = values_of(metrics, "reward")
    accuracy = values_of(metrics, "eval/pass@1")
    ratios = values_of(metrics, "ratio/staleness_0")
    return Summary(
        run_id=run_id,
        steps=len(rewards),
        reward_first2=fmean(rewards[:2]),
        reward_last5=fmean(rewards[-5:]),
        eval_before=accuracy[0],
        eval_after=accuracy[-1],
        wall_s=wall_s,
        tokens_generated=int(str(details["generated_tokens"])),
        staleness_mean=fmean(values_of(metrics, "sample/staleness_mean")),
        staleness_max=max(values_of(metrics, "sample/staleness_max")),
        publish_to_served_p50_s=seconds_until_served(events),
        trainer_idle_fraction=float(str(details["trainer_idle_fraction"])),
        ratio_staleness_0=fmean(ratios) if ratios else None,
        adapter_path=str(adapter_path),
    )


def seconds_until_served(events: Sequence[RunEvent]) -> float | None:
    """Median, from the acceptance of a version's manifest to the first job that may use it."""
    served = [
        float(seconds)
        for event in events
        if event.kind == "version_served"
        and isinstance(seconds := event.data.get("publish_to_served_s"), int | float)
    ]
    return median(served) if served else None


def values_of(metrics: MetricSeries, name: str) -> list[float]:
    """A series in the order of its steps."""
    return [point.value for point in metrics.series.get(name, ())]


def submit_and_watch(stack: Stack, spec: Path) -> str:
    """Run the CLI as a person would; the id of the run, once it has succeeded."""
    url = stack.addresses.orchestrator
    offbeat = program("offbeat")
    submitted = subprocess.run(
        [offbeat, "submit", str(spec), "--url", url, "--json"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    run_id: str = json.loads(submitted.stdout)["id"]
    watching = subprocess.Popen([offbeat, "watch", run_id, "--url", url])
    try:
        while watching.poll() is None:
            stack.watch()
            time.sleep(0.2)
    finally:
        if watching.poll() is None:
            watching.terminate()
        watching.wait()
    if watching.returncode:
        raise StackError(f"the run did not succeed; see {stack.options.logs}/ for the reason")
    return run_id


def show(
    console: Console,
    summary: Summary,
    metrics: MetricSeries,
    before: Sequence[RolloutView],
    after: Sequence[RolloutView],
    model: Path,
) -> None:
    """What a person wants to see at the end."""
    rewards = values_of(metrics, "eval/reward")
    table = Table(title="Held-out prompts, greedy", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("reward", f"{rewards[0]:.2f}", f"{rewards[-1]:.2f}")
    table.add_row("accuracy", f"{summary.eval_before:.2f}", f"{summary.eval_after:.2f}")
    console.print(table)
    answers = Table(title="The same questions, before and after", title_justify="left")
    for column in ("question", "before", "after"):
        answers.add_column(column, overflow="fold")
    for old, new in zip(before, after, strict=True):
        answers.add_row(escape(question(old.prompt)), _answer(old), _answer(new))
    console.print(answers)
    console.print(
        f"\nTraining reward went from [bold]{summary.reward_first2:.2f}[/] (first two steps) to "
        f"[bold]{summary.reward_last5:.2f}[/] (last five) in {summary.steps} steps and "
        f"{summary.wall_s / 60:.1f} minutes."
    )
    console.print(f"The adapter is in [bold]{escape(summary.adapter_path)}[/]. To use it:\n")
    console.print(LOADING.format(model=model, adapter=summary.adapter_path), style="cyan")


def question(prompt: str) -> str:
    """The last user message of a rendered chat, without its markup."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0].strip()


def _answer(view: RolloutView) -> str:
    mark = "[green]✓[/]" if (view.reward or 0) >= 1 else "[red]✗[/]"
    return f"{mark} {escape(view.completion.strip())}"


def run_demo(options: StackOptions, spec: Path, console: Console) -> Summary:
    """The whole demonstration."""
    folder = options.data_dir / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    with running_stack(options, sys.stdout) as stack:
        began = time.monotonic()
        run_id = submit_and_watch(stack, spec)
        wall_s = time.monotonic() - began
        with OffbeatClient(stack.addresses.orchestrator) as client:
            metrics = client.metrics(run_id)
            steps = client.run(run_id).progress.step
            adapter_path = folder / "adapter"
            client.download_adapter(run_id, adapter_path)
            summary = summarise(
                run_id=run_id,
                metrics=metrics,
                events=list(client.iter_events(run_id)),
                details=dict(client.diagnosis(run_id).details),
                wall_s=wall_s,
                adapter_path=adapter_path,
            )
            before, after = (
                client.rollouts(run_id, split="eval", version=version, limit=SAMPLES_SHOWN).data
                for version in (0, steps)
            )
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
    model = resolve_model(load_spec(spec).model, options.model_cache, None)
    show(console, summary, metrics, before, after, model)
    return summary


def main() -> int:
    """Run the demonstration and say where its summary lies."""
    parser = argparse.ArgumentParser(description="Watch a small model learn on this machine.")
    parser.add_argument("--data-dir", type=Path, default=Path(".offbeat"))
    parser.add_argument("--spec", type=Path, default=EXAMPLE)
    parser.add_argument("--vllm-python", type=Path, help="sample with the vLLM of this Python")
    arguments = parser.parse_args()
    console = Console()
    interrupt_on_signals()
    try:
        options = StackOptions(data_dir=arguments.data_dir, vllm_python=arguments.vllm_python)
        run_demo(options, arguments.spec, console)
    except (StackError, subprocess.CalledProcessError) as error:
        console.print(f"[red]The demonstration did not finish:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("\nStopped.")
        return 130
    console.print(f"Summary: {arguments.data_dir}/demo/summary.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
