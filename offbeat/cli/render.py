"""Runs, events, samples, series and workers as a terminal shows them. Pure: values in, rich out.

Nothing is marked up in strings, so no name and no completion can style itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from offbeat.cli import text
from offbeat.contracts.data_sources import (
    DataSection,
    HuggingFaceData,
    InlineData,
    ReasoningGymData,
)
from offbeat.contracts.projects import KeyView, ProjectView
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import (
    EventLevel,
    GarbageView,
    MetricPoint,
    MetricSeries,
    ReplayView,
    RolloutView,
    RunEvent,
    RunStatus,
    RunView,
    WorkerView,
)

PROMPT_CHARS_MAX = 400
COMPLETION_CHARS_MAX = 1200
"""As much of a sample as one reads in a list; `--full` shows all of it."""
EVENT_KIND_WIDTH = 18
"""Keeps the messages of a log below one another."""

STATUS_STYLES: Mapping[RunStatus, str] = {
    RunStatus.QUEUED: "dim",
    RunStatus.RUNNING: "cyan",
    RunStatus.PAUSED: "yellow",
    RunStatus.SUCCEEDED: "green",
    RunStatus.FAILED: "red",
    RunStatus.CANCELLED: "yellow",
}
LEVEL_STYLES: Mapping[EventLevel, str] = {
    EventLevel.INFO: "dim",
    EventLevel.WARNING: "yellow",
    EventLevel.ERROR: "red",
}
_FREE_TEXT = ("NAME", "TREND", "SERVING", "JOBS")


def runs_table(runs: Iterable[RunView], now: datetime) -> Table:
    """One line a run."""
    table = _table("ID", "NAME", "STATUS", ">STEP", ">REWARD", ">VERSION", ">AGE")
    for run in runs:
        progress = run.progress
        table.add_row(
            run.id,
            Text(run.name, no_wrap=True, overflow="ellipsis"),
            Text(run.status, STATUS_STYLES[run.status]),
            f"{progress.step}/{progress.steps}",
            text.reward(progress.reward),
            text.NONE if progress.version is None else str(progress.version),
            text.duration((now - run.created_at).total_seconds()),
        )
    return table


def run_details(run: RunView, now: datetime) -> RenderableType:
    """Everything worth knowing of one run."""
    fields = {
        **_spec_fields(run.spec),
        "pool": f"{run.pool}, priority {run.priority}",
        "tags": ", ".join(f"{key}={value}" for key, value in run.tags.items()),
        "created": text.moment(run.created_at),
        "started": text.moment(run.started_at),
        "finished": text.moment(run.finished_at),
        "took" if run.finished_at else "elapsed": text.duration(elapsed_s(run, now)),
    }
    grid = Table.grid(padding=(0, 2))
    for name, value in fields.items():
        if value not in ("", text.NONE):
            grid.add_row(Text(name, "dim"), Text(text.safe(value)))
    return Group(
        run_title(run), progress_line(run), Text(), Padding(grid, (0, 0, 0, 2), expand=False)
    )


def run_title(run: RunView) -> Text:
    """Id, name and status, with the reason where there is one."""
    reason = f"  {text.safe(run.status_reason)}" if run.status_reason else ""
    return Text.assemble(
        (f"{run.id}  ", "dim"),
        (f"{run.name}  ", "bold"),
        (run.status, STATUS_STYLES[run.status]),
        reason,
    )


def progress_line(run: RunView) -> Text:
    """`step 12/40  reward 0.53  version 12  staleness 1.0  182 tok/s  eta 3m10s`: what is known."""
    progress = run.progress
    words = [f"step {progress.step}/{progress.steps}"]
    if run.headline_value is not None:
        words.append(f"{run.headline} {text.reward(run.headline_value)}")
    if progress.version is not None:
        words.append(f"version {progress.version}")
    if progress.staleness_mean is not None:
        words.append(f"staleness {progress.staleness_mean:.1f}")
    if progress.generated_tokens_per_s is not None:
        words.append(f"{progress.generated_tokens_per_s:.0f} tok/s")
    if progress.eta_s is not None and run.status is RunStatus.RUNNING:
        words.append(f"eta {text.duration(progress.eta_s)}")
    return Text("  ".join(words))


def summary_line(run: RunView, now: datetime) -> Text:
    """How a run ended, in a line."""
    progress = run.progress
    words = f" after {text.duration(elapsed_s(run, now))}, step {progress.step}/{progress.steps}"
    if run.headline_value is not None:
        words += f", {run.headline} {text.reward(run.headline_value)}"
    if run.status_reason and run.status is not RunStatus.SUCCEEDED:
        words += f": {text.safe(run.status_reason)}"
    return Text.assemble((run.status, STATUS_STYLES[run.status]), words)


def elapsed_s(run: RunView, now: datetime) -> float | None:
    """Since the run was started, or as long as it took; none before."""
    if run.started_at is None:
        return None
    return ((run.finished_at or now) - run.started_at).total_seconds()


def event_line(event: RunEvent, *, brief: bool = False) -> RenderableType:
    """Date, level, kind and message; `brief` has the time only and cuts the message to the line."""
    grid = Table.grid(
        Column(no_wrap=True),
        Column(no_wrap=True, min_width=len(EventLevel.WARNING)),
        Column(no_wrap=True, min_width=EVENT_KIND_WIDTH),
        Column(),
        padding=(0, 2, 0, 0),
    )
    grid.add_row(
        Text(text.clock(event.at) if brief else text.moment(event.at), "dim"),
        Text(event.level, LEVEL_STYLES[event.level]),
        Text(text.safe(event.kind), "dim"),
        Text(text.safe(event.message), no_wrap=brief, overflow="ellipsis" if brief else None),
    )
    return grid


def sample(rollout: RolloutView, *, full: bool) -> RenderableType:
    """The reward and its parts, where the sample comes from, the prompt and its completion."""
    title = Text.assemble((f"reward {text.reward(rollout.reward)}", "bold"))
    if len(rollout.rewards) > 1:
        parts = (f"{name} {text.reward(part)}" for name, part in rollout.rewards.items())
        title.append(f" ({', '.join(parts)})")
    trained = f"  step {rollout.trained_step}" if rollout.trained_step is not None else ""
    title.append(
        f"  version {rollout.policy_version}{trained}  {rollout.num_tokens} tokens"
        f"  {rollout.finish_reason}  {rollout.group_id}#{rollout.sample}",
        "dim",
    )
    texts = Table.grid(padding=(0, 2))
    for name, body, chars_max in (
        ("prompt", rollout.prompt, PROMPT_CHARS_MAX),
        ("completion", rollout.completion, COMPLETION_CHARS_MAX),
    ):
        shown = text.safe(body).strip()
        texts.add_row(Text(name, "dim"), Text(shown if full else text.shorten(shown, chars_max)))
    return Group(title, Padding(texts, (0, 0, 1, 2), expand=False))


def metrics_table(metrics: MetricSeries) -> Table:
    """One line a series: where it began, where it is, its bounds and its trend."""
    table = _table("SERIES", ">STEP", ">FIRST", ">LAST", ">MIN", ">MAX", "TREND")
    for name, points in metrics.series.items():
        if points:
            table.add_row(Text(text.safe(name)), *_series_cells(points))
    return table


def _series_cells(points: Sequence[MetricPoint]) -> tuple[str, ...]:
    values = [point.value for point in points]
    numbers = (values[0], values[-1], min(values), max(values))
    return (str(points[-1].step), *map(text.number, numbers), text.sparkline(values))


def workers_table(workers: Sequence[WorkerView], now: datetime) -> RenderableType:
    """One line a worker, and below it why some of them get no jobs."""
    table = _table("ID", "ROLE", "POOL", "ENGINE", "STATUS", "SERVING", "JOBS", ">SEEN")
    for worker in workers:
        report = worker.report
        table.add_row(
            Text(text.safe(worker.id)),
            report.role,
            report.pool,
            Text(text.safe(report.engine)),
            Text(worker.status, "green" if worker.status == "alive" else "red"),
            ", ".join(f"{served.run_id}@{served.version}" for served in report.serving)
            or text.NONE,
            ", ".join(worker.jobs) or text.NONE,
            text.duration((now - worker.last_seen_at).total_seconds()),
        )
    notes = (
        Text(
            f"{text.safe(worker.id)} gets no jobs for "
            f"{text.duration((worker.quarantine.until - now).total_seconds())}: "
            f"{text.safe(worker.quarantine.reason)}",
            style="yellow",
        )
        for worker in workers
        if worker.quarantine
    )
    return Group(table, *notes)


def projects_table(projects: Iterable[ProjectView]) -> Table:
    """One line a project: what it uses of what it may."""
    table = _table("PROJECT", ">ACTIVE RUNS", ">JOBS IN FLIGHT", ">STORED BYTES")
    for project in projects:
        use, quotas = project.use, project.quotas
        table.add_row(
            project.id,
            f"{use.active_runs}/{quotas.active_runs_max}",
            f"{use.jobs_in_flight}/{quotas.jobs_in_flight_max}",
            f"{use.stored_bytes}/{quotas.stored_bytes_max}",
        )
    return table


def keys_table(keys: Iterable[KeyView]) -> Table:
    """One line a key."""
    table = _table("ID", "NAME", "CREATED")
    for key in keys:
        table.add_row(key.id, Text(text.safe(key.name)), text.moment(key.created_at))
    return table


def spec_summary(spec: RunSpec) -> RenderableType:
    """What a spec asks for."""
    grid = Table.grid(padding=(0, 2))
    for name, value in _spec_fields(spec).items():
        grid.add_row(Text(name, "dim"), Text(text.safe(value)))
    return Padding(grid, (0, 0, 0, 2), expand=False)


def _spec_fields(spec: RunSpec) -> dict[str, str]:
    return {
        "model": f"{spec.model.id}, {spec.model.dtype}, {_trained(spec)}",
        "data": f"{spec.data.source}: {_data(spec.data)}",
        **(_sft_fields(spec) if spec.kind == "sft" else _grpo_fields(spec)),
    }


def _trained(spec: RunSpec) -> str:
    return f"LoRA rank {spec.lora.rank}" if spec.lora else "all weights"


def _grpo_fields(spec: RunSpec) -> dict[str, str]:
    rollout, train = spec.rollout, spec.train
    rewards = (f"{reward.label} × {text.number(reward.weight)}" for reward in spec.rewards)
    return {
        "rewards": " + ".join(rewards),
        "rollout": (
            f"{rollout.groups_per_step} groups × {rollout.group_size} samples a step, up to "
            f"{rollout.max_new_tokens} tokens, temperature {text.number(rollout.temperature)}"
        ),
        "train": f"{train.steps} steps, {train.loss}, learning rate {train.learning_rate:g}",
    }


def _sft_fields(spec: RunSpec) -> dict[str, str]:
    train = spec.train
    return {
        "train": (
            f"{train.steps} supervised steps of {spec.sft.batch_size} examples, "
            f"learning rate {train.learning_rate:g}"
        ),
    }


def _data(data: DataSection) -> str:
    if isinstance(data, ReasoningGymData):
        return ", ".join(task.name for task in data.tasks)
    if isinstance(data, HuggingFaceData):
        return f"{data.dataset} ({data.split})"
    if isinstance(data, InlineData):
        return f"{len(data.rows)} rows"
    return data.uri


def _table(*headers: str) -> Table:
    """A table without lines; a header that begins with `>` makes its column flush right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers:
        name = header.removeprefix(">")
        right = header.startswith(">")
        # Only a column that may wrap gives up width, so that ids and numbers are never cut.
        table.add_column(name, justify="right" if right else "left", no_wrap=name not in _FREE_TEXT)
    return table


def garbage_text(garbage: GarbageView) -> Text:
    """What was removed of a run, or would be."""
    verb = "would be" if garbage.dry_run else "were"
    lines = [f"{garbage.num_objects} objects of {garbage.size_bytes:,} bytes {verb} removed."]
    for reason, size_bytes in sorted(garbage.size_bytes_by_reason.items()):
        lines.append(f"  {reason:<15} {size_bytes:>15,} bytes")
    return Text("\n".join(lines))


def replay_text(replay: ReplayView) -> Text:
    """What came of taking a step again."""
    if replay.is_same is None:
        return Text(
            f"The replay is {replay.status}: {text.safe(replay.error or 'no reason given')}"
        )
    if replay.is_same:
        return Text(f"Step {replay.step} gives the same adapter: {replay.published_sha256}")
    return Text(
        f"Step {replay.step} gives another adapter.\n"
        f"  published   {replay.published_sha256}\n"
        f"  recomputed  {replay.recomputed_sha256}",
        style="red",
    )
