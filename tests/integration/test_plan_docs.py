"""What `docs/plan.md` shows is what the commands print."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app

DOCUMENT = Path("docs/plan.md")
SHOWN = re.compile(r"```console\n\$ offbeat (?P<command>.+)\n(?P<output>(?:.*\n)*?)```")
BLOCKS = [(shown["command"], shown["output"]) for shown in SHOWN.finditer(DOCUMENT.read_text())]


def printed(command: str) -> str:
    """Without the blanks that pad a line."""
    result = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "110"})
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.stdout.rstrip().splitlines()) + "\n"


@pytest.mark.parametrize(("command", "output"), BLOCKS, ids=[block[0] for block in BLOCKS])
def test_the_document_shows_what_the_command_prints(command: str, output: str) -> None:
    assert output == printed(command)


def test_the_document_shows_70b_in_full_with_lora_and_with_qlora() -> None:
    shown = " ".join(output for _, output in BLOCKS)
    for method in ("68.98B parameters, full fine-tuning", "68.98B parameters, LoRA of rank 16"):
        assert method in shown
    assert "68.98B parameters, QLoRA (nf4) of rank 16" in shown
