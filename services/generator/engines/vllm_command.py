"""The command that starts a vLLM server as Offbeat needs it. Pure: nothing is started here."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MODULE = "vllm.entrypoints.openai.api_server"
LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
"""What `--max-lora-rank` takes."""
CPU_LORAS = 64
"""Adapters that vLLM keeps in host memory, at least. An adapter beyond them is read from its folder
again when a request names it."""

FLOAT32_HEAD = '{"head_dtype": "float32"}'
"""The head in float32, as in the trainer: bfloat16 logits are off by up to 1/16 nat."""

NOT_ALLOWED: Mapping[str, str] = {
    "--enable-sleep-mode": "sleep loses the adapters (vllm#39934)",
    "--data-parallel-size": "a load reaches one replica only: start a generator for each",
    "-dp": "a load reaches one replica only: start a generator for each",
    "--api-server-count": "a load reaches one server only: start a generator for each",
    "--model": "each run names its model",
    "--served-model-name": "it is the run's model.id",
    "--dtype": "it is the run's model.dtype",
    "--host": "the server listens on loopback",
    "--port": "a free one is taken",
    "--max-loras": "set OFFBEAT_VLLM_MAX_LORAS",
    "--max-lora-rank": "set OFFBEAT_VLLM_MAX_LORA_RANK",
    "--max-cpu-loras": "it follows OFFBEAT_VLLM_MAX_LORAS",
    "--logprobs-mode": "training needs processed_logprobs",
    "--generation-config": "the run says how to sample",
    "--scheduling-policy": "proofs of new versions go first",
    "--api-key": "set OFFBEAT_VLLM_API_KEY",
}
"""Arguments that nobody may add, and why."""


@dataclass(frozen=True, kw_only=True)
class AdapterLimits:
    """What a server is started with."""

    max_loras: int
    """Adapters in one batch."""
    max_lora_rank: int


def parse_arguments(text: str) -> tuple[str, ...]:
    """The words of a command line; `ValueError` for one that Offbeat decides itself."""
    words = tuple(shlex.split(text))
    for word in words:
        name = word.split("=")[0].replace("_", "-")
        if name in NOT_ALLOWED:
            raise ValueError(f"{name} cannot be given: {NOT_ALLOWED[name]}")
    return words


def server_command(
    python: str,
    *,
    folder: Path,
    model_id: str,
    dtype: str,
    port: int,
    limits: AdapterLimits,
    arguments: Sequence[str],
) -> tuple[str, ...]:
    """The command; `SERVER_ENVIRONMENT` belongs to it."""
    return (
        *(python, "-m", MODULE, "--model", str(folder), "--served-model-name", model_id),
        *("--dtype", dtype, "--host", "127.0.0.1", "--port", str(port)),
        *("--enable-lora", "--max-loras", str(limits.max_loras)),
        *("--max-cpu-loras", str(max(limits.max_loras, CPU_LORAS))),
        *("--max-lora-rank", str(limits.max_lora_rank)),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--scheduling-policy", "priority", "--hf-overrides", FLOAT32_HEAD),
        *arguments,
    )


SERVER_ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",  # the model is a folder
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
