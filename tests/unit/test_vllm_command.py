"""How a vLLM server is started, and what a generator's settings refuse."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from services.generator.engines.vllm_command import (
    NOT_ALLOWED,
    SERVER_ENVIRONMENT,
    AdapterLimits,
    parse_arguments,
    server_command,
)
from services.generator.settings import GeneratorSettings


def test_the_command_is_what_the_engine_needs() -> None:
    command = server_command(
        "/venv/bin/python",
        folder=Path("/models/tiny"),
        model_id="tiny",
        dtype="float32",
        port=8123,
        limits=AdapterLimits(max_loras=6, max_lora_rank=16),
        arguments=parse_arguments("--gpu-memory-utilization 0.8 --max-model-len=512"),
    )
    assert " ".join(command) == (
        "/venv/bin/python -m vllm.entrypoints.openai.api_server --model /models/tiny "
        "--served-model-name tiny --dtype float32 --host 127.0.0.1 --port 8123 "
        "--enable-lora --max-loras 6 --max-cpu-loras 64 --max-lora-rank 16 "
        "--logprobs-mode processed_logprobs --generation-config vllm --scheduling-policy priority "
        '--hf-overrides {"head_dtype": "float32"} '
        "--gpu-memory-utilization 0.8 --max-model-len=512"
    )
    assert SERVER_ENVIRONMENT["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_l11_sleep_mode_is_refused() -> None:
    with pytest.raises(ValidationError, match="--enable-sleep-mode cannot be given: sleep loses"):
        GeneratorSettings(vllm_args="--enable-sleep-mode")


@pytest.mark.parametrize("word", ["--data-parallel-size", "-dp", "--api-server-count"])
def test_l13_replicas_behind_one_address_are_refused(word: str) -> None:
    with pytest.raises(ValidationError, match=r"reaches one (replica|server) only"):
        GeneratorSettings(vllm_args=f"{word} 2")


@pytest.mark.parametrize("word", NOT_ALLOWED)
def test_what_offbeat_decides_cannot_be_given(word: str) -> None:
    for spelling in (f"{word}=1", word.replace("-", "_").replace("__", "--")):
        with pytest.raises(ValueError, match=f"^{word} cannot be given: "):
            parse_arguments(spelling)


def test_l10_only_ranks_that_vllm_knows_are_taken() -> None:
    assert GeneratorSettings(vllm_max_lora_rank=1).vllm_max_lora_rank == 1
    with pytest.raises(ValidationError, match=r"Input should be 1, 8, 16, 32, 64, 128, 256, 320"):
        GeneratorSettings.model_validate({"vllm_max_lora_rank": 24})


def test_an_engine_without_a_server_is_refused_with_both_ways_out() -> None:
    with pytest.raises(ValidationError, match=r"OFFBEAT_VLLM_URL.*OFFBEAT_VLLM_PYTHON"):
        GeneratorSettings(engine="vllm")
    with pytest.raises(ValidationError, match="needs either"):
        GeneratorSettings(engine="vllm", vllm_url="http://127.0.0.1:1", vllm_python="python3")
    assert GeneratorSettings(engine="vllm", vllm_python="python3").vllm_url is None
    assert GeneratorSettings().engine == "transformers"


def test_the_environment_names_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_ENGINE", "vllm")
    monkeypatch.setenv("OFFBEAT_VLLM_URL", "http://127.0.0.1:8000")
    monkeypatch.setenv("OFFBEAT_VLLM_MAX_LORA_RANK", "16")
    settings = GeneratorSettings()
    assert (settings.engine, settings.vllm_url) == ("vllm", "http://127.0.0.1:8000")
    assert settings.vllm_max_lora_rank == 16
