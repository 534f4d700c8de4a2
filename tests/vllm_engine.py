"""A vLLM engine on a server of the tests."""

from pathlib import Path
from typing import Any

from pydantic import SecretStr

from offbeat.contracts.run_spec import ModelSection
from offbeat.models import load_tokenizer
from services.generator.engines.vllm import VllmEngine, VllmOptions
from services.generator.engines.vllm_command import AdapterLimits
from services.generator.engines.vllm_http import ServerAddress

MODEL = ModelSection(id="tiny", dtype="float32")


def vllm_engine(
    url: str,
    model_folder: Path,
    adapters_folder: Path,
    *,
    api_key: str | None = None,
    **options: Any,
) -> VllmEngine:
    """With short timeouts; `options` are those of `VllmOptions`."""
    return VllmEngine(
        VllmOptions(
            address=ServerAddress(url=url, api_key=SecretStr(api_key) if api_key else None),
            **{
                "limits": AdapterLimits(max_loras=8, max_lora_rank=16),
                "sequences_max": 4,
                "start_timeout_s": 5.0,
                "request_timeout_s": 30.0,
                **options,
            },
        ),
        model=MODEL,
        model_folder=model_folder,
        tokenizer=load_tokenizer(model_folder, None),
        adapters_folder=adapters_folder,
    )
