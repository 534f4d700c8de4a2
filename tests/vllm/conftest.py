"""A real vLLM: `make test-vllm` installs it in an environment of its own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.contracts.run_spec import ModelSection
from services.generator.engines.vllm_command import (
    SERVER_ENVIRONMENT,
    AdapterLimits,
    server_command,
)
from services.generator.engines.vllm_http import ServerAddress, VllmClient
from services.generator.engines.vllm_server import VllmServer, free_port, wait_until_healthy
from tests.tiny_model import write_tiny_model
from tests.vllm.versions import Versions

VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"
START_TIMEOUT_S = 600.0
SMALL_HEAD_DIM = 32
"""The smallest that vLLM's attention on CPUs knows."""
LIMITS = AdapterLimits(max_loras=4, max_lora_rank=8)


@pytest.fixture(scope="session", autouse=True)
def _small_vllm() -> None:
    """One thread and 1 GiB of cache: two servers and a stack share a small machine."""
    os.environ.update({"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"})


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    assert VLLM_PYTHON.exists(), "run these tests with `make test-vllm`"
    return VLLM_PYTHON


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with heads that vLLM can compute."""
    return write_tiny_model(tmp_path_factory.mktemp("small"), head_dim=SMALL_HEAD_DIM)


@pytest.fixture(scope="session")
def versions(small_model: Path) -> Versions:
    return Versions(small_model)


@pytest.fixture(scope="session")
def vllm_address(vllm_python: Path, small_model: Path) -> Iterator[ServerAddress]:
    """A running server of that model."""
    model = ModelSection(id="small", dtype="float32")
    port = free_port()
    command = server_command(
        str(vllm_python),
        folder=small_model,
        model_id=model.id,
        dtype=model.dtype,
        port=port,
        limits=LIMITS,
        arguments=(),
    )
    address = ServerAddress(url=f"http://127.0.0.1:{port}")
    client = VllmClient(address)
    server = VllmServer(command, SERVER_ENVIRONMENT, lambda: None)
    try:
        wait_until_healthy(client.is_healthy, lambda: server.problem, START_TIMEOUT_S)
        yield address
    finally:
        server.close()
        client.close()
