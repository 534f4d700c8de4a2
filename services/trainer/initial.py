"""The adapter a run starts from: seeded, or another run's, or any PEFT folder under `s3://`."""

import json
from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    ADAPTER_WEIGHTS,
    FILE_BYTES_MAX,
)
from offbeat.errors import ObjectNotFoundError, PermanentJobError
from offbeat.objects import S3ObjectStore, split_s3_uri
from services.trainer import checkpoint
from services.trainer.policy import Policy
from services.trainer.versions import Versions

SCALING_FIELDS = ("r", "lora_alpha", "use_rslora", "use_dora")
"""What, besides the tensors, decides how an adapter changes the model."""


def initial_adapter(
    spec: RunSpec, policy: Policy, store: S3ObjectStore, versions: Versions
) -> dict[str, Tensor]:
    """The masters of version 0. Raises `PermanentJobError` for an adapter that does not fit."""
    source = spec.init_from
    if source is None:
        return seeded_adapter(policy.shapes, spec.train.seed)
    files = _fetch(source, store, versions)
    return fitted_adapter(source, files, policy)


def seeded_adapter(shapes: Mapping[str, torch.Size], seed: int) -> dict[str, Tensor]:
    """A uniform within 1/sqrt(d_in), as PEFT draws it; B zero, so the policy is the base model.

    Drawn on the CPU by a generator of its own: the same seed gives the same bytes everywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    adapter: dict[str, Tensor] = {}
    for name in sorted(shapes):
        adapter[name] = torch.zeros(shapes[name])
        if name.endswith(".lora_A.weight"):
            bound = shapes[name][1] ** -0.5
            adapter[name].uniform_(-bound, bound, generator=generator)
    return adapter


def fitted_adapter(source: str, files: Mapping[str, bytes], policy: Policy) -> dict[str, Tensor]:
    """The weights of a PEFT folder in float32, if they are an adapter of this very form."""
    try:
        config = dict[str, object](json.loads(files[ADAPTER_CONFIG]))
        tensors = load(files[ADAPTER_WEIGHTS])
    except (ValueError, TypeError, RecursionError, SafetensorError) as error:
        raise PermanentJobError(f"lora.init_from {source!r} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() and torch.isfinite(tensor).all()):
            raise PermanentJobError(
                f"lora.init_from {source!r}: {name} is {tensor.dtype} or has values that are not "
                "finite: save the adapter in float32, float16 or bfloat16"
            )
    adapter = {name: tensor.float() for name, tensor in tensors.items()}
    own = policy.config.to_dict()
    for field in SCALING_FIELDS:
        if config.get(field, own[field]) != own[field]:
            raise PermanentJobError(
                f"lora.init_from {source!r} has {field} = {config[field]}, the spec {own[field]}: "
                "make them equal"
            )
    shapes = {name: tensor.shape for name, tensor in adapter.items()}
    for name in sorted(shapes.keys() | policy.shapes.keys()):
        if shapes.get(name) != policy.shapes.get(name):
            raise PermanentJobError(
                f"lora.init_from {source!r} has {_form(shapes, name)}, the spec asks for "
                f"{_form(policy.shapes, name)}: lora.rank and lora.target_modules must be its own"
            )
    return adapter


def _form(shapes: Mapping[str, torch.Size], name: str) -> str:
    return f"{name} {list(shapes[name])}" if name in shapes else f"no {name}"


def _fetch(source: str, store: S3ObjectStore, versions: Versions) -> dict[str, bytes]:
    if source.startswith("s3://"):
        return _fetch_folder(source, store)
    run_id, _, version = source.rpartition("@")
    if not run_id or not version.isdigit():
        raise PermanentJobError(
            f"lora.init_from is {source!r}: write <run>@<version> or s3://bucket/folder"
        )
    manifest = versions.get(run_id, int(version))
    if manifest is None:
        raise PermanentJobError(f"lora.init_from: run {run_id!r} has no version {version}")
    try:
        return checkpoint.download(store, manifest, ADAPTER_FILES)
    except ObjectNotFoundError as error:
        raise PermanentJobError(
            f"lora.init_from: version {version} of run {run_id!r} was removed, as its retention "
            f"says: /v1/runs/{run_id}/checkpoints shows which ones are there"
        ) from error


def _fetch_folder(uri: str, store: S3ObjectStore) -> dict[str, bytes]:
    try:
        bucket, prefix = split_s3_uri(uri)
        folder = store.with_bucket(bucket)
        return {name: _fetch_file(folder, f"{prefix.rstrip('/')}/{name}") for name in ADAPTER_FILES}
    except (ValueError, ObjectNotFoundError) as error:
        raise PermanentJobError(f"lora.init_from is no PEFT folder: {error}") from error


def _fetch_file(store: S3ObjectStore, key: str) -> bytes:
    size_bytes = store.size_bytes(key) or 0
    if size_bytes > FILE_BYTES_MAX:
        raise ValueError(f"{key!r} has {size_bytes} bytes; {FILE_BYTES_MAX} are allowed")
    return store.get(key)
