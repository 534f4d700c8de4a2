import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offbeat.cli.main import app
from offbeat.cli.session import ExitCode
from offbeat.contracts.plan import Plan
from tests.specs import spec_dict

SEVENTY = spec_dict(model={"id": "meta-llama/Llama-2-70b-hf", "dtype": "bfloat16"})


@pytest.fixture
def spec_file(tmp_path: Path) -> str:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(SEVENTY))
    return str(path)


def plan(*arguments: str) -> Result:
    """Without a service."""
    return CliRunner().invoke(app, ["plan", *arguments], env={"OFFBEAT_URL": "http://127.0.0.1:1"})


def lines(result: Result) -> list[str]:
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_a_plan_says_whether_the_run_fits_and_how(spec_file: str) -> None:
    result = plan(spec_file, "--gpus", "8xA100-80GB")
    assert result.exit_code == ExitCode.OK
    shown = lines(result)
    assert shown[0] == (
        "meta-llama/Llama-2-70b-hf: 68.98B parameters, LoRA of rank 2 (25.89M trained), kind grpo"
    )
    assert shown[1].startswith("8xA100-80GB: fits, ")
    assert "gradient checkpointing no chosen" in shown
    assert "what would fit" not in shown


def test_a_plan_that_does_not_fit_says_what_would(spec_file: str) -> None:
    result = plan(spec_file, "--gpus", "1x80GB", "--no-offload")
    assert result.exit_code == ExitCode.OK
    shown = lines(result)
    assert shown[1].startswith("1x80GB: does not fit, ")
    wanted = shown[shown.index("what would fit") + 1 :]
    assert wanted[0].startswith("offload to the CPU ")
    assert wanted[1].startswith('QLoRA (quantization = "nf4") ')
    assert any(line.startswith("– No speed: only the memory") for line in shown)


def test_options_stand_in_for_the_specs_words(spec_file: str) -> None:
    result = plan(
        spec_file,
        *("--gpus", "8xH100", "--nodes", "2", "--link", "0.1", "--model", "Qwen/Qwen2.5-7B"),
        *("--full", "--token-budget", "4096", "--checkpointing", "--no-offload", "--json"),
    )
    assert result.exit_code == ExitCode.OK
    made = Plan.model_validate_json(result.stdout)
    assert (made.model, made.nodes, made.gpus) == ("Qwen/Qwen2.5-7B", 2, "8xH100")
    settings = made.settings
    assert (settings.method, settings.lora_rank, settings.token_budget) == ("full", None, 4096)
    assert (settings.gradient_checkpointing, settings.offload) == (True, False)
    assert settings.chosen == ("sharding",)
    # All gradients, in float32, over 100 Mbit/s.
    assert made.traffic.between_nodes_bytes == 4 * made.num_parameters
    assert made.traffic.between_nodes_s == made.traffic.between_nodes_bytes / 12.5e6


def test_a_local_folder_is_a_model(spec_file: str, tiny_model: Path) -> None:
    result = plan(spec_file, "--gpus", "1x24GB", "--model", str(tiny_model), "--json")
    assert Plan.model_validate_json(result.stdout).num_trained == 2048


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--gpus", "A100"), "write 2x24GB, 8xA100-80GB or 1xH100"),
        (("--gpus", "1xK80"), "there is no card 'K80' here"),
        (("--gpus", "1x24GB", "--model", "org/unknown"), "put its config.json into a folder"),
        (("--gpus", "1x24GB", "--full", "--quantization", "nf4"), "leave out full, or nf4"),
        (("--gpus", "1x24GB", "--nodes", "0"), "--nodes"),
        ((), "--gpus"),
    ],
)
def test_wrong_usage_is_explained(
    spec_file: str, arguments: tuple[str, ...], complaint: str
) -> None:
    result = plan(spec_file, *arguments)
    assert result.exit_code == ExitCode.INVALID
    assert complaint in result.stderr
    assert result.stdout == ""
