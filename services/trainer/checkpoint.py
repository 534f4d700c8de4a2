"""A version as files: the PEFT folder that generators pull, and the state that the next step needs.

The same state gives the same bytes, and `decode` gives back exactly the state that was encoded: a
run that was resumed cannot be told from one that was never interrupted.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from offbeat import keys
from offbeat.contracts.base import Contract
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    STATE_RECORD,
    Manifest,
    VersionFile,
)
from offbeat.errors import IntegrityError, WorkerError
from offbeat.objects import ObjectStore
from services.trainer.model import Tensors
from services.trainer.policy import Policy
from services.trainer.state import TrainerState

STATE_TENSORS = "trainer_state.safetensors"
STATE_FILES = (STATE_TENSORS, STATE_RECORD)
STATE_FIELDS = ("masters", "exp_avg", "exp_avg_sq")
DOWNLOAD_THREADS = 4


class StateScalars(Contract):
    """What is not a tensor; the rest of a step follows from spec, seed and version."""

    num_updates: int
    spec_sha256: str
    """Of the run's spec as JSON, for whoever audits or replays a step."""


def encode(state: TrainerState, policy: Policy, spec: RunSpec) -> dict[str, bytes]:
    """The files of a version by name. Raises `WorkerError` for a state that must not be seen."""
    fields: dict[str, Tensors] = {field: getattr(state, field) for field in STATE_FIELDS}
    for field, tensors in fields.items():
        _refuse_unsound(field, tensors, policy.shapes)
    scalars = StateScalars(
        num_updates=state.num_updates,
        spec_sha256=spec_sha256(spec),
    )
    return {
        ADAPTER_WEIGHTS: _safetensors(
            {name: master.to(policy.dtype) for name, master in state.masters.items()}
        ),
        ADAPTER_CONFIG: _adapter_config(policy),
        STATE_TENSORS: _safetensors(
            {
                f"{field}.{name}": tensor
                for field, tensors in fields.items()
                for name, tensor in tensors.items()
            }
        ),
        STATE_RECORD: scalars.model_dump_json().encode(),
    }


def spec_sha256(spec: RunSpec) -> str:
    """What a state says of the spec that it was made with."""
    return hashlib.sha256(spec.model_dump_json().encode()).hexdigest()


def decode(files: Mapping[str, bytes], policy: Policy) -> TrainerState:
    """The state that `encode` was given. Raises `IntegrityError` for anything else."""
    try:
        tensors = load(files[STATE_TENSORS])
        scalars = StateScalars.model_validate_json(files[STATE_RECORD])
        fields = {
            field: {name: tensors[f"{field}.{name}"].to(policy.device) for name in policy.shapes}
            for field in STATE_FIELDS
        }
    except (SafetensorError, ValidationError, KeyError) as error:
        raise IntegrityError(f"the trainer's state cannot be read: {error!r}") from error
    return TrainerState(**fields, num_updates=scalars.num_updates)


def describe(files: Mapping[str, bytes]) -> tuple[VersionFile, ...]:
    """The manifest's entries for these files."""
    return tuple(_described(name, body) for name, body in files.items())


def put(store: ObjectStore, prefix: str, name: str, body: bytes) -> VersionFile:
    """Upload a file below the prefix of a version; the manifest's entry for it."""
    store.put(prefix + name, body)
    return _described(name, body)


def _described(name: str, body: bytes) -> VersionFile:
    return VersionFile(name=name, size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest())


def download(store: ObjectStore, manifest: Manifest, names: Sequence[str]) -> dict[str, bytes]:
    """Files of a published version, each checked against the manifest."""
    with ThreadPoolExecutor(DOWNLOAD_THREADS) as pool:
        bodies = pool.map(lambda name: _verified(store, manifest, name), names)
        return dict(zip(names, bodies, strict=True))


def _verified(store: ObjectStore, manifest: Manifest, name: str) -> bytes:
    key = keys.version_file(manifest, name)
    body = store.get(key)
    if hashlib.sha256(body).hexdigest() != manifest.file(name).sha256:
        raise IntegrityError(f"{key!r} is not what the manifest of its version says")
    return body


def _refuse_unsound(field: str, tensors: Tensors, shapes: Mapping[str, torch.Size]) -> None:
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
        raise WorkerError(f"{field} of the trainer's state do not have the adapter's shapes")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise WorkerError(f"{field} of {name!r} are not finite: lower train.learning_rate")


def _safetensors(tensors: Tensors) -> bytes:
    return save(
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, {"format": "pt"}
    )


def _adapter_config(policy: Policy) -> bytes:
    config = {
        **policy.config.to_dict(),
        "target_modules": policy.target_modules,
        "inference_mode": True,
    }
    return json.dumps(config, indent=2, sort_keys=True).encode()
