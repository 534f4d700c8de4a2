"""From a model id to its architecture: well-known models by name, others by their `config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path

from offbeat.errors import InvalidRequestError
from offbeat.plan.architecture import Architecture, architecture_from_config

CONFIG_BYTES_MAX = 2**20
"""A `config.json` has a few kilobytes."""


def _dense(
    name: str,
    hidden: int,
    num_layers: int,
    heads: tuple[int, int, int],
    mlp: int,
    vocabulary: int,
    *,
    is_tied: bool = False,
) -> Architecture:
    """`heads`: of queries, of keys, and the size of each."""
    num_heads, num_kv_heads, head_dim = heads
    return Architecture(
        name=name,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp=mlp,
        vocabulary=vocabulary,
        is_tied=is_tied,
    )


_MODELS = (
    _dense("llama-2-7b", 4096, 32, (32, 32, 128), 11008, 32000),
    _dense("llama-2-13b", 5120, 40, (40, 40, 128), 13824, 32000),
    _dense("llama-2-70b", 8192, 80, (64, 8, 128), 28672, 32000),
    _dense("llama-3-8b", 4096, 32, (32, 8, 128), 14336, 128256),
    _dense("llama-3-70b", 8192, 80, (64, 8, 128), 28672, 128256),
    _dense("llama-3.1-8b", 4096, 32, (32, 8, 128), 14336, 128256),
    _dense("llama-3.1-70b", 8192, 80, (64, 8, 128), 28672, 128256),
    _dense("llama-3.1-405b", 16384, 126, (128, 8, 128), 53248, 128256),
    _dense("llama-3.2-1b", 2048, 16, (32, 8, 64), 8192, 128256, is_tied=True),
    _dense("llama-3.2-3b", 3072, 28, (24, 8, 128), 8192, 128256, is_tied=True),
    _dense("llama-3.3-70b", 8192, 80, (64, 8, 128), 28672, 128256),
    _dense("mistral-7b", 4096, 32, (32, 8, 128), 14336, 32768),
    _dense("qwen2.5-0.5b", 896, 24, (14, 2, 64), 4864, 151936, is_tied=True),
    _dense("qwen2.5-1.5b", 1536, 28, (12, 2, 128), 8960, 151936, is_tied=True),
    _dense("qwen2.5-3b", 2048, 36, (16, 2, 128), 11008, 151936, is_tied=True),
    _dense("qwen2.5-7b", 3584, 28, (28, 4, 128), 18944, 152064),
    _dense("qwen2.5-14b", 5120, 48, (40, 8, 128), 13824, 152064),
    _dense("qwen2.5-32b", 5120, 64, (40, 8, 128), 27648, 152064),
    _dense("qwen2.5-72b", 8192, 80, (64, 8, 128), 29568, 152064),
    _dense("qwen2.5-math-1.5b", 1536, 28, (12, 2, 128), 8960, 151936, is_tied=True),
    _dense("qwen2.5-math-7b", 3584, 28, (28, 4, 128), 18944, 152064),
    _dense("qwen3-0.6b", 1024, 28, (16, 8, 128), 3072, 151936, is_tied=True),
    _dense("qwen3-1.7b", 2048, 28, (16, 8, 128), 6144, 151936, is_tied=True),
    _dense("qwen3-4b", 2560, 36, (32, 8, 128), 9728, 151936, is_tied=True),
    _dense("qwen3-8b", 4096, 36, (32, 8, 128), 12288, 151936),
    _dense("qwen3-14b", 5120, 40, (40, 8, 128), 17408, 151936),
    _dense("qwen3-32b", 5120, 64, (64, 8, 128), 25600, 151936),
    Architecture(
        name="qwen3-30b-a3b",
        hidden=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        mlp=768,
        vocabulary=151936,
        is_tied=False,
        num_experts=128,
        experts_per_token=8,
    ),
    _dense("smollm2-135m", 576, 30, (9, 3, 64), 1536, 49152, is_tied=True),
    _dense("smollm2-360m", 960, 32, (15, 5, 64), 2560, 49152, is_tied=True),
    _dense("smollm2-1.7b", 2048, 24, (32, 32, 64), 8192, 49152, is_tied=True),
)
KNOWN: Mapping[str, Architecture] = {model.name: model for model in _MODELS}


def architecture_of(model_id: str) -> Architecture:
    """The architecture of a well-known model or of a local folder. Raises `InvalidRequestError`."""
    config_file = Path(model_id) / "config.json"
    if model_id.startswith(("/", "./", "../")) or config_file.is_file():
        return _from_folder(model_id, config_file)
    return known_architecture(model_id)


def known_architecture(model_id: str) -> Architecture:
    """The architecture of a well-known model. Raises `InvalidRequestError` for another one."""
    name = model_id.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    found = [known for known in KNOWN if name == known or name.startswith(f"{known}-")]
    if not found:
        raise InvalidRequestError(
            f"the sizes of model {model_id!r} are not known here: put its config.json into a "
            "folder and name that folder as the model (over HTTP: send it as `config`); known by "
            f"name are {', '.join(KNOWN)}"
        )
    return KNOWN[max(found, key=len)]


def _from_folder(model_id: str, config_file: Path) -> Architecture:
    try:
        with config_file.open("rb") as file:
            config = json.loads(file.read(CONFIG_BYTES_MAX))
    except OSError as error:
        raise InvalidRequestError(
            f"model {model_id!r} has no config.json that can be read: name a folder that "
            "save_pretrained wrote"
        ) from error
    except ValueError as error:
        raise InvalidRequestError(f"{config_file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidRequestError(f"{config_file} is not a JSON object")
    return architecture_from_config(model_id, config)
