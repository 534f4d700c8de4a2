"""The commands. Each asks the client and shows the answer; what they share is in `session`."""

from collections import deque
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import typer
from pydantic_core import to_json
from rich.console import Group
from rich.text import Text

from offbeat.cli import render
from offbeat.cli.chat import Conversation, converse
from offbeat.cli.plan import SpecFile, plan
from offbeat.cli.projects import keys, projects
from offbeat.cli.session import (
    EXIT_CODE_HELP,
    ExitCode,
    JsonOption,
    RunArgument,
    Session,
    console,
    end_with,
    exit_codes,
    with_session,
)
from offbeat.cli.watch import watch_to_end
from offbeat.client import Split
from offbeat.contracts.runs import Page, RolloutView, RunStatus, RunView
from offbeat.errors import InvalidRequestError
from offbeat.pages import PAGE_ITEMS, all_pages
from offbeat.specs import InvalidSpecError, load_spec, validate_spec

RUNS, RESULTS, FLEET = "Runs", "What a run makes", "Other"

app = typer.Typer(
    name="offbeat",
    help="Submit, watch and steer runs of asynchronous GRPO.",
    epilog=EXIT_CODE_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

app.add_typer(projects, name="project", rich_help_panel=FLEET)
app.add_typer(keys, name="key", rich_help_panel=FLEET)

app.command(rich_help_panel=RUNS)(plan)


@app.command(rich_help_panel=RUNS)
@with_session
def submit(
    session: Session,
    file: SpecFile,
    watch: Annotated[bool, typer.Option("--watch", help="Stay until the run has ended.")] = False,
    name: Annotated[str | None, typer.Option(help="A name in place of the spec's.")] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="The same key and spec give the same run again.")
    ] = None,
) -> None:
    """Create a run from a spec file."""
    spec = load_spec(file)
    if name is not None:
        spec = validate_spec({**spec.model_dump(mode="json", exclude_unset=True), "name": name})
    run = session.client.submit(spec, idempotency_key)
    if watch:
        session.note(f"Submitted {run.name} as {run.id}.")
        end_with(watch_to_end(session, run))
    _answer_status(session, run)
    session.note(f"Watch it: offbeat watch {run.id}")


@app.command("list", rich_help_panel=RUNS)
@with_session
def list_runs(
    session: Session,
    status: Annotated[RunStatus | None, typer.Option(help="Only runs of this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
) -> None:
    """Show the runs, newest first."""
    pages = all_pages(lambda after: session.client.runs(status, min(limit, PAGE_ITEMS), after))
    runs = list(islice(pages, limit))
    session.answer(runs, render.runs_table(runs, datetime.now(UTC)))


@app.command(rich_help_panel=RUNS)
@with_session
def show(session: Session, run: RunArgument) -> None:
    """Show one run: where it is, and what it was asked to do."""
    found = session.find_run(run)
    session.answer(found, render.run_details(found, datetime.now(UTC)))


@app.command(rich_help_panel=RUNS)
@with_session
def watch(session: Session, run: RunArgument) -> None:
    """Follow a run until it has ended. Ctrl-C leaves the run going."""
    end_with(watch_to_end(session, session.find_run(run)))


@app.command(rich_help_panel=RUNS)
@with_session
def pause(session: Session, run: RunArgument) -> None:
    """Start no more jobs of a run; those under way finish and count."""
    _answer_status(session, session.client.pause(session.find_run(run).id))


@app.command(rich_help_panel=RUNS)
@with_session
def resume(session: Session, run: RunArgument) -> None:
    """Let a paused run go on."""
    _answer_status(session, session.client.resume(session.find_run(run).id))


@app.command(rich_help_panel=RUNS)
@with_session
def cancel(session: Session, run: RunArgument) -> None:
    """End a run. What it has made stays."""
    _answer_status(session, session.client.cancel(session.find_run(run).id))


@app.command(rich_help_panel=RUNS)
@with_session
def retry(session: Session, run: RunArgument) -> None:
    """Take a failed or cancelled run up again from its last version."""
    _answer_status(session, session.client.retry(session.find_run(run).id))


@app.command(rich_help_panel=RUNS)
@with_session
def delete(
    session: Session,
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a run that has ended, and everything that it has made."""
    found = session.find_run(run)
    if not yes:
        typer.confirm(f"Remove {found.name} ({found.id}) with all its versions?", abort=True)
    session.client.delete(found.id)
    session.answer({"run_id": found.id}, Text(f"{found.name} ({found.id}) is deleted."))


@app.command(rich_help_panel=RUNS)
@with_session
def gc(
    session: Session,
    run: RunArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
) -> None:
    """Remove at once what a run's retention gives up anyway, a little later."""
    view = session.client.collect_garbage(session.find_run(run).id, dry_run=dry_run)
    session.answer(view, render.garbage_text(view))


@app.command(rich_help_panel=RESULTS)
@with_session
def events(
    session: Session,
    run: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 50,
) -> None:
    """Show the log of a run."""
    run_id = session.find_run(run).id
    newest = deque(session.client.iter_events(run_id), limit)
    if not follow:
        session.answer(list(newest), Group(*map(render.event_line, newest)))
        return
    later = session.client.stream_events(run_id, newest[-1].id if newest else 0)
    for event in chain(newest, later):
        session.stream(event, render.event_line(event))


@app.command(rich_help_panel=RESULTS)
@with_session
def metrics(
    session: Session,
    run: RunArgument,
    name: Annotated[
        list[str] | None, typer.Option("--name", "-n", help="Only this series; may be repeated.")
    ] = None,
) -> None:
    """Show the series of a run, with their trends."""
    series = session.client.metrics(session.find_run(run).id, name)
    session.answer(series, render.metrics_table(series))


@app.command(rich_help_panel=RESULTS)
@with_session
def rollouts(
    session: Session,
    run: RunArgument,
    step: Annotated[int | None, typer.Option(help="Trained in this step.")] = None,
    version: Annotated[int | None, typer.Option(help="Sampled by this version.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="With at least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="With at most this reward.")] = None,
    split: Annotated[Split, typer.Option(help="Training or held-out prompts.")] = "train",
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 5,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten the texts.")] = False,
) -> None:
    """Read samples: prompt, completion and reward."""
    run_id = session.find_run(run).id

    def fetch(after: str | None) -> Page[RolloutView]:
        return session.client.rollouts(
            run_id,
            step=step,
            version=version,
            min_reward=min_reward,
            max_reward=max_reward,
            split=split,
            limit=min(limit, PAGE_ITEMS),
            after=after,
        )

    found = list(islice(all_pages(fetch), limit))
    session.answer(found, Group(*(render.sample(rollout, full=full) for rollout in found)))


@app.command(rich_help_panel=RESULTS)
@with_session
def adapter(
    session: Session,
    run: RunArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A file that ends in .zip, or a folder.")
    ],
    version: Annotated[int | None, typer.Option(help="This version, not the newest.")] = None,
) -> None:
    """Download the adapter, as PEFT loads it."""
    run_id = session.find_run(run).id
    try:
        session.client.download_adapter(run_id, output, version)
    except OSError as error:
        raise InvalidRequestError(f"cannot write {output}: {error.strerror}") from error
    session.answer({"run_id": run_id, "version": version, "path": str(output)}, Text(str(output)))


@app.command(rich_help_panel=RESULTS)
@with_session
def model(
    session: Session,
    run: RunArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="A folder.")],
) -> None:
    """Download the model of a run without [lora], as transformers loads it."""
    run_id = session.find_run(run).id
    try:
        found = session.client.download_model(run_id, output)
    except OSError as error:
        raise InvalidRequestError(f"cannot write {output}: {error.strerror}") from error
    session.answer(found, Text(str(output)))


@app.command(rich_help_panel=RESULTS)
@with_session
def replay(
    session: Session,
    run: RunArgument,
    step: Annotated[int, typer.Option(min=1, help="The step to take again.")],
) -> None:
    """Take a step again on a trainer, and say whether it gives the same adapter."""
    run_id = session.find_run(run).id
    asked = session.client.replay(run_id, step)
    session.note(f"Step {step} of {run_id} is being taken again as {asked.id}.")
    answer = session.client.wait_for_replay(asked)
    session.answer(answer, render.replay_text(answer))
    if not answer.is_same:
        raise typer.Exit(ExitCode.RUN_ENDED_BADLY)


@app.command(rich_help_panel=RESULTS)
@with_session
def chat(
    session: Session,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@VERSION]",
            help="Id of a run, the beginning of one, or `latest`; its newest version, or this one.",
        ),
    ],
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Ask only this, and end.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of an answer.")] = None,
) -> None:
    """Talk to the policy of a run as it is now."""
    name, at, version = run.partition("@")
    model = session.find_run(name).id + at + version
    conversation = Conversation(session, model, temperature, max_tokens)
    if message is None:
        converse(session, conversation)
    else:
        conversation.ask(message)


@app.command(rich_help_panel=FLEET)
@with_session
def workers(session: Session) -> None:
    """Show the workers that reported lately."""
    found = session.client.workers()
    session.answer(found, render.workers_table(found, datetime.now(UTC)))


@app.command(rich_help_panel=FLEET)
def validate(file: SpecFile, as_json: JsonOption = False) -> None:
    """Check a spec file, without a service."""
    with exit_codes():
        try:
            spec = load_spec(file)
        except InvalidSpecError as error:
            if as_json:
                typer.echo(to_json({"valid": False, "errors": error.fields}, indent=2))
            raise
    if as_json:
        typer.echo(to_json({"valid": True, "spec": spec}, indent=2))
    else:
        out = console(stderr=False)
        out.print(Text(f"{file} is valid."), render.spec_summary(spec))


def _answer_status(session: Session, run: RunView) -> None:
    session.answer(run, render.run_title(run))
