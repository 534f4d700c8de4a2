"""What all commands share: the connection, the two outputs, the exit codes, and finding a run.

The result of a command goes to stdout and everything else to stderr. With `--json` stdout has one
JSON document, or one JSON object a line where the command goes on for a while.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from inspect import Parameter, Signature, signature
from itertools import islice
from typing import Annotated, Concatenate

import typer
from pydantic_core import to_json
from rich.console import Console, RenderableType
from rich.text import Text

from offbeat.cli import text
from offbeat.client import DEFAULT_URL, OffbeatClient
from offbeat.contracts.runs import RunStatus, RunView
from offbeat.errors import (
    IntegrityError,
    InvalidRequestError,
    NotFoundError,
    OffbeatError,
    UnauthorizedError,
    UnavailableError,
)
from offbeat.spec_problems import problem_lines
from offbeat.specs import InvalidSpecError

RETRY_S = 3.0
"""A person waits in front of the terminal, so an outage is reported soon."""
RUNS_SEARCHED = 1000
"""The newest runs among which the beginning of an id is looked up."""
PIPE_WIDTH = 10_000
"""Columns where stdout is no terminal: `grep` and `awk` want whole lines."""


class ExitCode(IntEnum):
    """What a script can tell from the exit status."""

    OK = 0
    RUN_ENDED_BADLY = 1
    INVALID = 2
    NOT_FOUND = 3
    REFUSED = 4
    UNAVAILABLE = 5
    INTERRUPTED = 130


EXIT_CODE_HELP = (
    "Exit codes: 0 done; 1 the run failed or was cancelled (watch, submit --watch), or a replay "
    "gave another adapter; "
    "2 wrong usage or an invalid spec; 3 not found; 4 refused, in conflict or unauthorized; "
    "5 the service is unavailable; 130 interrupted."
)

_CODES: tuple[tuple[type[OffbeatError], ExitCode], ...] = (
    (InvalidRequestError, ExitCode.INVALID),
    (NotFoundError, ExitCode.NOT_FOUND),
    (UnavailableError, ExitCode.UNAVAILABLE),
    (IntegrityError, ExitCode.UNAVAILABLE),
    (OffbeatError, ExitCode.REFUSED),
)
_HINTS: tuple[tuple[type[OffbeatError], str], ...] = (
    (UnavailableError, "Is the service up? Its address is --url or OFFBEAT_URL."),
    (UnauthorizedError, "The key is --api-key or OFFBEAT_API_KEY."),
)

RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Id of a run, the beginning of one, or `latest`."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@dataclass(frozen=True, kw_only=True)
class Session:
    """One invocation."""

    client: OffbeatClient
    as_json: bool
    out: Console
    err: Console

    def answer(self, value: object, shown: RenderableType) -> None:
        """The result: the value for programs, or how people see it."""
        if self.as_json:
            typer.echo(to_json(value, indent=2))
        else:
            self.out.print(shown)

    def stream(self, value: object, shown: RenderableType) -> None:
        """One of a series of results."""
        if self.as_json:
            typer.echo(to_json(value))
        else:
            self.out.print(shown)

    def note(self, message: str) -> None:
        """Something for people that is not the result."""
        if not self.as_json:
            self.err.print(Text(message, "dim"))

    def find_run(self, name: str) -> RunView:
        """The run with this id, the only one whose id begins so, or the latest."""
        if not name:
            raise InvalidRequestError("the run is empty: give an id, or `latest`")
        if name == "latest":
            newest = self.client.runs(limit=1).data
            if not newest:
                raise NotFoundError("there are no runs yet: `offbeat submit` one")
            return newest[0]
        try:
            return self.client.run(name)
        except NotFoundError:
            return self._find_by_prefix(name)

    def _find_by_prefix(self, prefix: str) -> RunView:
        newest = islice(self.client.iter_runs(), RUNS_SEARCHED)
        found = [run for run in newest if run.id.startswith((prefix, f"run-{prefix}"))]
        if not found:
            raise NotFoundError(f"there is no run {prefix!r}: `offbeat list` shows them")
        if len(found) > 1:
            several = ", ".join(run.id for run in found[:5])
            raise InvalidRequestError(f"{prefix!r} is the beginning of several runs: {several}")
        return found[0]


def with_session(body: Callable[Concatenate[Session, ...], None]) -> Callable[..., None]:
    """Make a command of a function that takes a session: the options of the connection and `--json`
    are added to its own, and errors become a message and an exit code."""

    def run(
        *,
        url: Annotated[
            str, typer.Option("--url", envvar="OFFBEAT_URL", help="Address of the orchestrator.")
        ] = DEFAULT_URL,
        api_key: Annotated[
            str | None,
            typer.Option("--api-key", envvar="OFFBEAT_API_KEY", help="The key of your project."),
        ] = None,
        as_json: JsonOption = False,
        **arguments: object,
    ) -> None:
        with exit_codes(), OffbeatClient(url, api_key, retry_for_s=RETRY_S) as client:
            out, err = console(stderr=False), console(stderr=True)
            body(Session(client=client, as_json=as_json, out=out, err=err), **arguments)

    own = (
        parameter.replace(kind=Parameter.KEYWORD_ONLY)
        for parameter in list(signature(body).parameters.values())[1:]
    )
    shared = (
        parameter
        for parameter in signature(run).parameters.values()
        if parameter.kind is Parameter.KEYWORD_ONLY
    )
    run.__name__, run.__doc__ = body.__name__, body.__doc__
    vars(run)["__signature__"] = Signature([*own, *shared])
    return run


@contextmanager
def exit_codes() -> Iterator[None]:
    """End the process as `EXIT_CODE_HELP` promises, without a traceback for what can happen."""
    try:
        yield
    except InvalidSpecError as error:
        fail(*problem_lines(error.fields), code=ExitCode.INVALID)
    except OffbeatError as error:
        hint = next((hint for kind, hint in _HINTS if isinstance(error, kind)), "")
        code = next(code for kind, code in _CODES if isinstance(error, kind))
        fail(error.detail, hint, code=code)
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def fail(*lines: str, code: ExitCode) -> None:
    """Say what is wrong on stderr, and end the process."""
    err = console(stderr=True)
    for index, line in enumerate(filter(None, lines)):
        prefix = "error: " if index == 0 else "       "
        err.print(Text.assemble((prefix, "red"), text.safe(line)))
    raise typer.Exit(code)


def end_with(run: RunView) -> None:
    """End the process with what became of the run."""
    bad = run.status in (RunStatus.FAILED, RunStatus.CANCELLED)
    raise typer.Exit(ExitCode.RUN_ENDED_BADLY if bad else ExitCode.OK)


def console(*, stderr: bool) -> Console:
    """Where people read: as wide as the terminal, or wide enough for a pipe."""
    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPE_WIDTH
    return made
