"""Programs that are run: with their output in a log, and an error that shows its end."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.processes import last_lines

COMMAND_TIMEOUT_S = 3600.0
"""An image with torch is built from scratch on a slow line."""


class ComposeTestError(Exception):
    """Something is missing here, or did not do what it should."""


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Runs programs with one environment and one log."""

    environment: Mapping[str, str]
    log: Path

    def run(self, *command: str) -> None:
        """Run it to its end; what it writes goes to the log."""
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            code = subprocess.run(
                command,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            ).returncode
        if code:
            raise ComposeTestError(
                f"`{' '.join(command[:6])} …` ended with {code}. The last lines of {self.log}:\n"
                f"{last_lines(self.log)}"
            )

    def output(self, *command: str) -> str:
        """What it writes, without the line break at the end."""
        done = self.attempt(*command)
        if done.returncode:
            raise ComposeTestError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
        return done.stdout.strip()

    def attempt(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run it, whatever comes of it."""
        return subprocess.run(
            command,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )


def succeeds(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the program is there and ends with 0."""
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, timeout=60, check=False
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0
