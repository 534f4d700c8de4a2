"""`offbeat project …` and `offbeat key …`: what an administrator does with the admin key."""

from typing import Annotated

import typer
from rich.text import Text

from offbeat.cli import render
from offbeat.cli.session import RETRY_S, Session, with_session
from offbeat.contracts.projects import Quotas
from offbeat.projects import Projects

projects = typer.Typer(help="Manage projects and their quotas (admin key).", no_args_is_help=True)
keys = typer.Typer(help="Manage the API keys of projects (admin key).", no_args_is_help=True)

ProjectArgument = Annotated[
    str, typer.Argument(metavar="PROJECT", help="Small letters, digits and `-`.")
]
ActiveRuns = Annotated[int | None, typer.Option(min=0, help="Runs queued, running or paused.")]
JobsInFlight = Annotated[int | None, typer.Option(min=0, help="Jobs sent or with a worker.")]
StoredBytes = Annotated[int | None, typer.Option(min=0, help="Bytes in the object store.")]


@projects.command("create")
@with_session
def create(
    session: Session,
    project: ProjectArgument,
    active_runs_max: ActiveRuns = None,
    jobs_in_flight_max: JobsInFlight = None,
    stored_bytes_max: StoredBytes = None,
) -> None:
    """Make a project."""
    quotas = _quotas(active_runs_max, jobs_in_flight_max, stored_bytes_max)
    made = _projects(session).create(project, quotas)
    session.answer(made, render.projects_table([made]))
    session.note(f"Make its first key: offbeat key create {made.id} NAME")


@projects.command("list")
@with_session
def list_projects(session: Session) -> None:
    """Show the projects, and what they use of what they may."""
    found = list(_projects(session).all())
    session.answer(found, render.projects_table(found))


@projects.command("show")
@with_session
def show(session: Session, project: ProjectArgument) -> None:
    """Show one project; a project's own key may, too."""
    found = _projects(session).show(project)
    session.answer(found, render.projects_table([found]))


@projects.command("limit")
@with_session
def limit(
    session: Session,
    project: ProjectArgument,
    active_runs_max: ActiveRuns = None,
    jobs_in_flight_max: JobsInFlight = None,
    stored_bytes_max: StoredBytes = None,
) -> None:
    """Change the quotas that are given."""
    quotas = _quotas(active_runs_max, jobs_in_flight_max, stored_bytes_max)
    changed = _projects(session).change(project, quotas)
    session.answer(changed, render.projects_table([changed]))


@keys.command("create")
@with_session
def create_key(
    session: Session,
    project: ProjectArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is, or what it is for.")],
) -> None:
    """Make a key and show its secret, this once."""
    made = _projects(session).create_key(project, name)
    session.answer(made, Text(made.secret))
    session.note(f"{made.key.id}: set it as OFFBEAT_API_KEY. It cannot be shown again.")


@keys.command("list")
@with_session
def list_keys(session: Session, project: ProjectArgument) -> None:
    """Show a project's keys, without their secrets."""
    found = list(_projects(session).keys(project))
    session.answer(found, render.keys_table(found))


@keys.command("delete")
@with_session
def delete_key(
    session: Session,
    project: ProjectArgument,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Its id: key-…")],
) -> None:
    """Make a key invalid at once."""
    _projects(session).delete_key(project, key)
    session.answer({"deleted": key}, Text(f"{key} is deleted."))


def _projects(session: Session) -> Projects:
    return Projects(session.client, retry_for_s=RETRY_S)


def _quotas(active_runs: int | None, jobs_in_flight: int | None, stored: int | None) -> Quotas:
    """The quotas that were given on the command line; the others stay unset."""
    given = {
        "active_runs_max": active_runs,
        "jobs_in_flight_max": jobs_in_flight,
        "stored_bytes_max": stored,
    }
    return Quotas(**{name: value for name, value in given.items() if value is not None})
