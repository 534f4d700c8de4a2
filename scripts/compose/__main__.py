"""Does `docker compose up` train something, and does it survive the death of each container?

    python -m scripts.compose [--data-dir .offbeat] [--pull] [--keep]

builds the images, starts `docker-compose.yml`, has `scripts/smoke.py` train on it, kills a
container of each service on the way, adds generators, checks what came of it, trains all weights
of a model, backs everything up, throws it away, restores it, and removes what it started. Needs a
Docker engine, or root to start its own.
"""

import argparse
import sys
from pathlib import Path

from offbeat.errors import OffbeatError
from scripts.compose.checks import check_contained, check_restarts, check_without_torch
from scripts.compose.commands import Commands, ComposeTestError
from scripts.compose.engine import running_engine
from scripts.compose.images import build_images
from scripts.compose.restoring import check_restored
from scripts.compose.stack import ComposeStack, compose_environment
from scripts.compose.training import all_weights_trained, trained_while_parts_die
from scripts.parts import free_port
from scripts.processes import StackError, interrupt_on_signals, locked

GENERATORS = 3


def main() -> int:
    """The whole test, with a line for each part of it."""
    parser = argparse.ArgumentParser(description="Run docker-compose.yml for real.")
    parser.add_argument("--data-dir", type=Path, default=Path(".offbeat"))
    parser.add_argument("--pull", action="store_true", help="use the images of registries")
    parser.add_argument("--keep", action="store_true", help="leave everything running")
    options = parser.parse_args()
    interrupt_on_signals()
    try:
        run(options.data_dir.resolve() / "compose", pulled=options.pull, keep=options.keep)
    except (ComposeTestError, OffbeatError, StackError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    print("docker-compose.yml works")
    return 0


def run(folder: Path, *, pulled: bool, keep: bool) -> None:
    """Raises `ComposeTestError`, or what a client raises, for whatever does not work."""
    port = free_port()
    with locked(folder), running_engine(folder) as engine:
        commands = Commands(
            environment=compose_environment(engine, port, pulled=pulled),
            log=folder / "compose-test.log",
        )
        print("building the images …", flush=True)
        build_images(commands, engine.docker, pulled=pulled)
        commands.run("deploy/compose/secrets.sh")
        stack = ComposeStack(docker=engine.docker, commands=commands, port=port)
        stack.down()
        try:
            _check(stack, folder)
        except (ComposeTestError, OffbeatError):
            (folder / "containers.log").write_text(stack.logs())
            print(f"the containers' last lines are in {folder / 'containers.log'}")
            raise
        finally:
            if keep:
                input(f"{stack.url} runs; press Enter to stop it ")
            stack.down()


def _check(stack: ComposeStack, folder: Path) -> None:
    print("starting everything …", flush=True)
    stack.up()
    check_without_torch(stack)
    check_contained(stack)
    run_id = trained_while_parts_die(stack, generators=GENERATORS)
    check_restarts(stack)
    print("training all weights …", flush=True)
    all_weights_trained(stack)
    check_restored(stack, run_id, folder / "backup")


if __name__ == "__main__":
    sys.exit(main())
