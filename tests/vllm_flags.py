"""The flags of a vLLM server, and those that a generator would start one with."""

from pathlib import Path

from services.generator.engines.vllm_command import AdapterLimits, server_command

MAX_LORAS = 8
"""In all that is deployed."""
OF_THE_PLACE = {"--host", "--model", "--port", "--served-model-name"}
"""They differ from place to place."""


def flags(words: list[str]) -> dict[str, str | None]:
    """`--name value` and `--name=value` alike."""
    found: dict[str, str | None] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value or None
        elif name is not None:
            found[name] = word
    return found


def needed(*, max_lora_rank: int) -> dict[str, str | None]:
    """Those of the generator's own command, but for the place."""
    command = server_command(
        "python",
        folder=Path("model"),
        model_id="model",
        dtype="bfloat16",
        port=8100,
        limits=AdapterLimits(max_loras=MAX_LORAS, max_lora_rank=max_lora_rank),
        arguments=(),
    )
    found = flags(list(command))
    return {name: found[name] for name in found.keys() - OF_THE_PLACE}
