"""Where the prompts or examples of a run come from: the `data` section of its spec."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from offbeat.contracts.base import Contract


class DataBase(Contract):
    """The fields that all sources share."""

    system_prompt: Annotated[str, Field(max_length=65_536)] | None = None
    """Put before every prompt as a system message; none keeps the chat template's own default."""
    size: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Training prompts to take; none takes all there are (for `reasoning_gym`: 1,000)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    shuffle: bool = True
    eval_size: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Prompts held out for evaluation; they are never trained on."""


class FileFields(DataBase):
    """A table in TRL's prompt formats: a `prompt` column of strings or of message lists."""

    prompt_field: Annotated[str, Field(min_length=1, max_length=128)] = "prompt"


class GymTask(Contract):
    """One task of reasoning-gym in a mixture."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    weight: Annotated[float, Field(gt=0)] = 1.0
    config: dict[str, JsonValue] = Field(default_factory=dict)


class ReasoningGymData(DataBase):
    """Prompts made by reasoning-gym; the entry travels to the reward."""

    source: Literal["reasoning_gym"]
    tasks: Annotated[tuple[GymTask, ...], Field(min_length=1, max_length=64)]


class JsonlData(FileFields):
    """One JSON object a line, from a file or `s3://bucket/key`."""

    source: Literal["jsonl"]
    uri: Annotated[str, Field(min_length=1, max_length=1024)]


class ParquetData(FileFields):
    """A Parquet table, from a file or `s3://bucket/key`."""

    source: Literal["parquet"]
    uri: Annotated[str, Field(min_length=1, max_length=1024)]


class HuggingFaceData(FileFields):
    """A dataset of the Hugging Face hub, or a local folder that `datasets` can load."""

    source: Literal["huggingface"]
    dataset: Annotated[str, Field(min_length=1, max_length=256)]
    split: Annotated[str, Field(min_length=1, max_length=128)] = "train"


class InlineData(FileFields):
    """Rows written into the spec itself: for smoke tests and for tiny tasks."""

    source: Literal["inline"]
    rows: Annotated[tuple[dict[str, JsonValue], ...], Field(min_length=1, max_length=1000)]


DataSection = Annotated[
    ReasoningGymData | JsonlData | ParquetData | HuggingFaceData | InlineData,
    Field(discriminator="source"),
]
