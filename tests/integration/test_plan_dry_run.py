"""The dry run of the trainer, and the formulas beside it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.cli.session import ExitCode
from offbeat.errors import InvalidRequestError
from offbeat.plan.architecture import Architecture
from offbeat.plan.choice import BAND
from offbeat.plan.dry_run import dry_run
from offbeat.plan.known_models import KNOWN
from offbeat.plan.setup import Method
from services.trainer.dry_run import count
from tests.specs import spec_dict
from tests.unit.plan.programs import setup

FOUR_BLOCKS = Architecture(
    name="four-blocks",
    hidden=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    mlp=1536,
    vocabulary=8192,
    is_tied=False,
)


@pytest.mark.parametrize(("method", "is_checkpointed"), [("lora", False), ("full", True)])
def test_a_dry_run_counts_what_the_formula_says(method: Method, is_checkpointed: bool) -> None:
    at = setup(method, 2048, is_checkpointed=is_checkpointed, num_shards=2)
    counted = count(FOUR_BLOCKS, at)
    assert counted.formula == pytest.approx(counted.total, rel=BAND)
    assert sum(counted.by_kind.values()) == counted.total


def test_the_command_shows_the_count_beside_the_formula(tiny_model: Path, tmp_path: Path) -> None:
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(json.dumps(spec_dict(model={"id": str(tiny_model)})))
    result = CliRunner().invoke(app, ["plan", str(spec_file), "--gpus", "2x24GB", "--dry-run"])
    assert result.exit_code == ExitCode.OK, result.stderr
    shown = [" ".join(line.split()) for line in result.stdout.splitlines()]
    counted = shown[shown.index("tensors of one GPU, counted in a dry run") + 1 :]
    assert counted[0].startswith("Sharded Param ")
    assert [line.split(" 0.")[0] for line in counted if "GiB" in line][-2:] == [
        "together",
        "by formula",
    ]


def test_what_a_dry_run_does_not_know_is_refused() -> None:
    quantised = setup("qlora", 256, is_checkpointed=True)
    adapted = setup("lora", 256, is_checkpointed=True)
    offloaded = setup("lora", 256, is_checkpointed=True, is_offloaded=True)
    experts = KNOWN["qwen3-30b-a3b"]
    for model, at in ((FOUR_BLOCKS, quantised), (FOUR_BLOCKS, offloaded), (experts, adapted)):
        with pytest.raises(InvalidRequestError, match="neither nf4 nor experts"):
            dry_run(model, at)
