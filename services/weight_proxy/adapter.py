"""What an adapter must look like before it may be published: pure checks, without torch.

The safetensors header is read, the values are not: whether they are finite is the trainer's check,
whether they act as they should is the generator's. The format is an 8-byte little-endian header
length, a JSON header, then the tensors back to back
(https://huggingface.co/docs/safetensors/index#format).
"""

import math
from collections.abc import Mapping
from io import BufferedReader
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    RootModel,
    StringConstraints,
    ValidationError,
    model_validator,
)

from offbeat import keys
from offbeat.contracts.weights import ADAPTER_CONFIG, ADAPTER_FILES, STATE_RECORD, Manifest
from offbeat.errors import InvalidRequestError

HEADER_BYTES_MAX = 16 * 2**20
"""About 100,000 tensors; an adapter on a 70B model has 1,120."""
CONFIG_BYTES_MAX = 2**20
"""PEFT's configuration has a few kilobytes."""
LENGTH_BYTES = 8
WHERE_CHARS_MAX = 200
"""How much of a place in the header, which the sender chose, an error repeats."""
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"

Shape = tuple[int, ...]
TensorName = Annotated[str, StringConstraints(max_length=512)]


class TensorEntry(BaseModel):
    """One tensor in a safetensors header; offsets count from the end of the header."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["F64", "F32", "F16", "BF16"]
    shape: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**40)], ...], Field(min_length=2, max_length=2)
    ]
    """Both LoRA factors are matrices."""
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]

    @property
    def size_bytes(self) -> int:
        """The bytes that its shape takes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class SafetensorsHeader(RootModel[dict[TensorName, TensorEntry]]):
    """The JSON header: the tensors by name, without the free-form `__metadata__`."""

    @model_validator(mode="before")
    @classmethod
    def _without_metadata(cls, header: object) -> object:
        if not isinstance(header, dict):
            return header
        return {name: entry for name, entry in header.items() if name != "__metadata__"}


def check_manifest(manifest: Manifest, run_id: str, version: int) -> None:
    """Raise `InvalidRequestError` unless the manifest is one of this version, by itself."""
    if (manifest.run_id, manifest.version) != (run_id, version):
        raise InvalidRequestError(
            f"the path names version {version} of {run_id!r}, the manifest version "
            f"{manifest.version} of {manifest.run_id!r}: send it to its own path"
        )
    parent = version - 1 if version else None
    if manifest.parent != parent:
        raise InvalidRequestError(
            f"the parent of version {version} is {parent}, not {manifest.parent}"
        )
    prefix = keys.version_prefix(run_id, version, manifest.job_id, manifest.attempt)
    if manifest.prefix != prefix:
        raise InvalidRequestError(
            f"prefix is {manifest.prefix!r}, but this attempt writes under {prefix!r}"
        )
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        raise InvalidRequestError("files: a name is listed twice")
    needed = {STATE_RECORD} if manifest.rank is None else set(ADAPTER_FILES)
    if missing := needed - set(names):
        raise InvalidRequestError(f"files: {sorted(missing)} must be listed")
    if manifest.has_adapter and manifest.file(ADAPTER_CONFIG).size_bytes > CONFIG_BYTES_MAX:
        raise InvalidRequestError(
            f"files: {ADAPTER_CONFIG} may have {CONFIG_BYTES_MAX} bytes: every generator reads it"
        )


def read_shapes(weights: BufferedReader, size_bytes: int) -> dict[str, Shape]:
    """The shape of every tensor by name. `InvalidRequestError` for a cut or hostile file."""
    header_bytes = int.from_bytes(weights.read(LENGTH_BYTES), "little")
    data_bytes = size_bytes - LENGTH_BYTES - header_bytes
    if data_bytes < 0 or header_bytes > HEADER_BYTES_MAX:
        raise InvalidRequestError(
            f"the adapter's header claims {header_bytes} bytes in a file of {size_bytes}: "
            "the file is cut off or no safetensors"
        )
    try:
        tensors = SafetensorsHeader.model_validate_json(weights.read(header_bytes)).root
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:WHERE_CHARS_MAX]
        raise InvalidRequestError(f"the adapter's header at {where!r}: {first['msg']}") from error
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.data_offsets):
        if tensor.data_offsets != (end, end + tensor.size_bytes):
            raise InvalidRequestError(
                f"the adapter's tensors do not lie back to back: one of {tensor.size_bytes} bytes "
                f"should begin at {end} but has offsets {tensor.data_offsets}"
            )
        end = tensor.data_offsets[1]
    if end != data_bytes:
        raise InvalidRequestError(
            f"the adapter's tensors take {end} bytes but the file holds {data_bytes}: "
            "it is cut off or has bytes to spare"
        )
    return {name: tensor.shape for name, tensor in tensors.items()}


def check_shapes(
    shapes: Mapping[str, Shape], rank: int, parent: Mapping[str, Shape] | None
) -> None:
    """Raise `InvalidRequestError` unless these are pairs of whole LoRA factors.

    A factors are (rank, in), B factors (out, rank). A shard saved as if it were whole has fewer
    rows: in A that contradicts the rank, in B only the shapes of the parent version can tell.
    """
    for name, shape in shapes.items():
        if not name.endswith((LORA_A, LORA_B)):
            raise InvalidRequestError(
                f"{name!r} is no LoRA factor: engines serve only `*{LORA_A}` and `*{LORA_B}`"
            )
        if shape[0 if name.endswith(LORA_A) else 1] != rank:
            raise InvalidRequestError(
                f"{name!r} has shape {shape}, which does not fit rank {rank}: "
                "gather a sharded tensor before it is saved"
            )
    modules_a = {name.removesuffix(LORA_A) for name in shapes if name.endswith(LORA_A)}
    modules_b = {name.removesuffix(LORA_B) for name in shapes if name.endswith(LORA_B)}
    if modules_a != modules_b or not modules_a:
        raise InvalidRequestError(
            f"the adapter has {len(modules_a)} A and {len(modules_b)} B factors: "
            "every module needs one of each"
        )
    if parent is not None and shapes != parent:
        changed = sorted(
            name for name in shapes.keys() | parent.keys() if shapes.get(name) != parent.get(name)
        )
        raise InvalidRequestError(
            f"{changed[0]!r} has shape {shapes.get(changed[0])}, but {parent.get(changed[0])} in "
            "the parent version: gather a sharded tensor before it is saved"
        )
