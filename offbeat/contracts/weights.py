"""What a policy version is: immutable files under one prefix, described by a manifest.

The manifest is published last, with a PUT to the weight-proxy, which decides in one atomic insert
which publish of a version wins. A version that can be read is therefore always whole.
"""

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from offbeat.contracts.base import Contract
from offbeat.contracts.bounds import Id, Metrics, Name, ObjectKey, Positive, TokenId, Version

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""A bare file name: no separators, so that no manifest can name a path outside its prefix."""

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
"""The PEFT folder: what generators pull."""
FILE_BYTES_MAX = 4 * 2**30
"""No file of a version may be larger: rank 512 on a 70B model stays well below."""
RANK_MAX = 65_536


class VersionFile(Contract):
    """One object of a version."""

    name: FileName
    size_bytes: Annotated[int, Field(ge=1, le=FILE_BYTES_MAX)]
    sha256: Sha256


class Canary(Contract):
    """The trainer's own greedy continuation of a short prompt, and its log-probabilities.

    A generator repeats it on its engine before it serves the version. `parent_logprobs` are those
    of the same tokens under the parent version: they are what lets the check tell N from N - 1.
    """

    prompt_ids: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=512)]
    completion_ids: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=64)]
    logprobs: Annotated[tuple[float, ...], Field(min_length=1, max_length=64)]
    """log pi_v of each completion token, temperature 1."""
    parent_logprobs: Annotated[tuple[float, ...], Field(max_length=64)] = ()
    """log pi_(v-1) of the same tokens; empty for version 0, which equals the base model."""


class SkippedStep(Contract):
    """Why a version has its parent's weights: the loss or the gradient was not finite."""

    reason: Annotated[str, Field(max_length=4096)]
    in_a_row: Positive
    """Steps skipped up to this one without a good one between."""
    batch_key: ObjectKey
    """Where the step's input lies for whoever looks into it."""


class Manifest(Contract):
    """One policy version of one run."""

    run_id: Id
    version: Version
    parent: Version | None
    """The version this one was trained from; none for version 0."""
    job_id: Id
    attempt: Positive
    """The job and attempt that made it: together with the version they name the prefix."""
    prefix: Annotated[str, StringConstraints(pattern=r"^runs/[^/]+/versions/[^/]+/$")]
    files: Annotated[tuple[VersionFile, ...], Field(min_length=1, max_length=64)]
    base_model: Annotated[str, Field(max_length=1024)]
    base_revision: Annotated[str, Field(max_length=128)] | None
    rank: Annotated[int, Field(ge=1, le=RANK_MAX)]
    alpha: float
    use_rslora: bool = False
    target_modules: Annotated[tuple[Name, ...], Field(max_length=4096)]
    canary: Canary
    metrics: Metrics = Field(default_factory=dict)
    """Metrics of the step that made the version, so that no later attempt has to recompute them."""
    dropped_group_ids: tuple[Name, ...] = ()
    """Groups of the step that the trainer refused (unknown hash, too old): an event names each."""
    skipped: SkippedStep | None = None

    def file(self, name: str) -> VersionFile:
        """The entry called `name`; KeyError where there is none."""
        for entry in self.files:
            if entry.name == name:
                return entry
        raise KeyError(name)

    @property
    def adapter_sha256(self) -> str:
        """The identity of the policy: the hash of its weights file."""
        return self.file(ADAPTER_WEIGHTS).sha256


class PublishedVersion(Contract):
    """A manifest that won, with the time at which it became visible."""

    manifest: Manifest
    published_at: datetime
