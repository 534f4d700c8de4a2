"""What a policy version is: immutable files under one prefix, described by a manifest.

The manifest is published last, with a PUT to the weight-proxy, which decides in one atomic insert
which publish of a version wins. A version that can be read is therefore always whole.
"""

from datetime import datetime
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from offbeat.contracts.base import Contract
from offbeat.contracts.bounds import Id, Metrics, Name, ObjectKey, Positive, TokenId, Version

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""A bare file name: no separators, so that no manifest can name a path outside its prefix."""

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
"""The PEFT folder: what generators pull."""
STATE_RECORD = "trainer_state.json"
"""What of the trainer's state is no tensor; every version has one."""
STATE_INDEX = "trainer_state.index.json"
"""Of a version of full fine-tuning at which the state is kept: where each part of it lies."""
MODEL_CONFIG = "config.json"
"""Of a folder that `from_pretrained` loads; the last version of full fine-tuning is one."""
STATE_PREFIX = "trainer_state"
"""How the names of all files begin that the trainer alone reads."""
FILE_BYTES_MAX = 4 * 2**30
"""No file of a version may be larger: rank 512 on a 70B model stays well below."""
FILES_MAX = 16_384
"""At most of a version: 70B weights in full with their optimizer are about 800 files."""
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
    files: Annotated[tuple[VersionFile, ...], Field(min_length=1, max_length=FILES_MAX)]
    base_model: Annotated[str, Field(max_length=1024)]
    base_revision: Annotated[str, Field(max_length=128)] | None
    rank: Annotated[int, Field(ge=1, le=RANK_MAX)] | None = None
    """Of the adapter; none in full fine-tuning, which has none."""
    alpha: float | None = None
    use_rslora: bool = False
    target_modules: Annotated[tuple[Name, ...], Field(max_length=4096)] = ()
    canary: Canary | None = None
    """None in full fine-tuning: no generator pulls its versions."""
    metrics: Metrics = Field(default_factory=dict)
    """Metrics of the step that made the version, so that no later attempt has to recompute them."""
    dropped_group_ids: tuple[Name, ...] = ()
    """Groups of the step that the trainer refused (unknown hash, too old): an event names each."""
    skipped: SkippedStep | None = None

    @model_validator(mode="after")
    def _an_adapter_is_whole(self) -> Self:
        if not self.has_adapter:
            return self
        if self.rank is None or self.alpha is None or self.canary is None:
            raise ValueError("a version with an adapter has its rank, its alpha and a canary")
        return self

    @property
    def has_adapter(self) -> bool:
        """Whether generators can pull it; else all weights of the model are trained."""
        return any(file.name == ADAPTER_WEIGHTS for file in self.files)

    @property
    def proof(self) -> Canary:
        """The canary of a version that has an adapter."""
        assert self.canary is not None, "full fine-tuning has no canary"
        return self.canary

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

    @property
    def sha256(self) -> str:
        """What tells the version from any other one: the hash of its adapter, or in full
        fine-tuning of the record, which holds its parent's."""
        return self.adapter_sha256 if self.has_adapter else self.file(STATE_RECORD).sha256

    @property
    def model_files(self) -> tuple[VersionFile, ...]:
        """Those of a whole model, where it is one."""
        own = tuple(file for file in self.files if not file.name.startswith(STATE_PREFIX))
        return own if any(file.name == MODEL_CONFIG for file in own) else ()

    def agrees_with(self, sealed: Self) -> bool:
        """Whether it is the version that was sealed, though by another attempt: its files are among
        these."""
        return set(sealed.files) <= set(self.files)


class PublishedVersion(Contract):
    """A manifest that won, with the time at which it became visible."""

    manifest: Manifest
    published_at: datetime
