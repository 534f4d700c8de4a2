from datetime import timedelta

from rich.console import Console, RenderableType

from offbeat.cli import render
from offbeat.contracts.runs import (
    EventLevel,
    MetricPoint,
    MetricSeries,
    QuarantineView,
    RunStatus,
)
from tests import run_views
from tests.specs import sft_spec

NOW = run_views.CREATED_AT + timedelta(seconds=400)


def lines(shown: RenderableType, width: int = 100) -> list[str]:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_table_of_runs_never_cuts_ids_and_numbers() -> None:
    runs = [
        run_views.run("run-00000000a1", name="a name of many words [bold]that goes on[/bold]"),
        run_views.run("run-00000000b2", status=RunStatus.QUEUED, step=0),
    ]
    assert lines(render.runs_table(runs, NOW), width=80) == [
        "ID              NAME                      STATUS    STEP  REWARD  VERSION    AGE",
        "run-00000000a1  a name of many words [b…  running  12/40    0.30       12  6m40s",
        "run-00000000b2  chain-sum                 queued    0/40       –        –  6m40s",
    ]


def test_the_details_of_a_run_begin_with_its_state() -> None:
    run = run_views.run(status=RunStatus.FAILED, status_reason="row 3 has no prompt", step=3)
    at = run.created_at.astimezone()
    assert lines(render.run_details(run, NOW)) == [
        "run-00000000a1  chain-sum  failed  row 3 has no prompt",
        "step 3/40  reward 0.07  version 3  staleness 1.0  182 tok/s",
        "",
        "  model     smollm2-135m-instruct, bfloat16, LoRA rank 16",
        "  data      reasoning_gym: chain_sum",
        "  rewards   reasoning_gym × 1",
        "  rollout   8 groups × 8 samples a step, up to 256 tokens, temperature 1",
        "  train     40 steps, dapo, learning rate 0.0001",
        "  pool      default, priority 0",
        "  tags      team=a",
        f"  created   {at:%Y-%m-%d %H:%M:%S}",
        f"  started   {at + timedelta(seconds=2):%Y-%m-%d %H:%M:%S}",
        f"  finished  {at + timedelta(seconds=762):%Y-%m-%d %H:%M:%S}",
        "  took      12m40s",
    ]


def test_a_supervised_run_is_told_by_its_loss() -> None:
    run = run_views.run(step=3).model_copy(update={"spec": sft_spec()})
    progress = run.progress.model_copy(update={"reward": None, "loss": 1.234})
    run = run.model_copy(update={"progress": progress})
    assert render.progress_line(run).plain.startswith("step 3/40  loss 1.23  version 3")
    assert "step 3/40, loss 1.23" in render.summary_line(run, NOW).plain
    assert lines(render.spec_summary(run.spec)) == [
        "  model  tiny, float32, LoRA rank 2",
        "  data   inline: 8 rows",
        "  train  3 supervised steps of 4 examples, learning rate 0.01",
    ]


def test_progress_tells_what_is_known() -> None:
    progress = [
        render.progress_line(run_views.run(status=status, step=step)).plain
        for status, step in (
            (RunStatus.QUEUED, 0),
            (RunStatus.RUNNING, 0),
            (RunStatus.RUNNING, 12),
            (RunStatus.PAUSED, 12),
        )
    ]
    assert progress == [
        "step 0/40",
        "step 0/40  version 0",
        "step 12/40  reward 0.30  version 12  staleness 1.0  182 tok/s  eta 3m10s",
        "step 12/40  reward 0.30  version 12  staleness 1.0  182 tok/s",
    ]


def test_the_summary_says_how_a_run_ended_and_why() -> None:
    ended = run_views.run(status=RunStatus.SUCCEEDED, step=40)
    assert render.summary_line(ended, NOW).plain == (
        "succeeded after 12m40s, step 40/40, reward 1.00"
    )
    failed = run_views.run(status=RunStatus.FAILED, step=0, status_reason="no \x1bprompt")
    assert render.summary_line(failed, NOW).plain == ("failed after 12m40s, step 0/40: no �prompt")


def test_an_event_wraps_below_its_message_or_is_cut() -> None:
    event = run_views.event(
        1, "A job is late and [red]goes[/red] to another worker.", level=EventLevel.WARNING
    )
    at = event.at.astimezone()
    assert lines(render.event_line(event), width=80) == [
        f"{at:%Y-%m-%d %H:%M:%S}  warning  step_done           A job is late and",
        " " * 50 + "[red]goes[/red] to another",
        " " * 50 + "worker.",
    ]
    assert lines(render.event_line(event, brief=True), width=60) == [
        f"{at:%H:%M:%S}  warning  step_done           A job is late and [r…"
    ]


def test_a_sample_is_shown_with_its_reward_and_shortened_unless_full_is_asked_for() -> None:
    sample = run_views.rollout(1, reward=None)
    sample = sample.model_copy(
        update={"completion": "7" * 2000, "rewards": {"format": 0.5, "answer": None}}
    )
    shown = lines(render.sample(sample, full=False), width=2100)
    assert shown == [
        "reward – (format 0.50, answer –)  version 3  step 4  9 tokens  stop  g-000007#1",
        "  prompt      What is 3 + 4?",
        "  completion  " + "7" * 1199 + "…",
        "",
    ]
    assert lines(render.sample(sample, full=True), width=2100)[2] == "  completion  " + "7" * 2000


def test_series_show_first_last_bounds_and_trend() -> None:
    points = tuple(MetricPoint(step=step, value=step * 0.25) for step in range(1, 5))
    series = MetricSeries(run_id="r", series={"reward": points, "empty": ()})
    assert lines(render.metrics_table(series)) == [
        "SERIES  STEP  FIRST  LAST   MIN  MAX  TREND",
        "reward     4   0.25     1  0.25    1  ▁▃▆█",
    ]


def test_workers_show_what_they_serve_and_hold() -> None:
    assert lines(render.workers_table([run_views.worker()], NOW)) == [
        "ID           ROLE       POOL     ENGINE        STATUS  SERVING            JOBS    SEEN",
        "generator-1  generator  default  transformers  alive   run-00000000a1@12  job-1  6m40s",
    ]


def test_a_worker_in_quarantine_says_why_and_for_how_long() -> None:
    quarantine = QuarantineView(
        reason="it failed 3 times in a row", until=NOW + timedelta(seconds=250)
    )
    worker = run_views.worker().model_copy(
        update={"status": "quarantined", "quarantine": quarantine}
    )
    table = lines(render.workers_table([worker], NOW))
    assert "quarantined" in table[1]
    assert table[2] == "generator-1 gets no jobs for 4m10s: it failed 3 times in a row"
