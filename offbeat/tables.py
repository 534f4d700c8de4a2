"""The Parquet tables (zstd) and their rows: prompts, examples of a supervised run, and rollouts.

pandas, polars and DuckDB read them as they are. Free-form values (extra columns of a prompt) are
stored as JSON text, because their types differ from row to row.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue

from offbeat.contracts.rollouts import Rollout
from offbeat.errors import IntegrityError

PROMPTS_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("columns", pa.string()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """A prompt, rendered and tokenised once; its place in the table is its `prompt_row`."""

    prompt_id: str
    """`<split>-<row>` of the source: stable while the data and the seed are."""
    prompt: str
    """The text after the chat template, as the model sees it."""
    prompt_ids: tuple[int, ...]
    columns: Mapping[str, JsonValue]
    """Every column of the source row, as rewards see them; `prompt` is the prompt as the data has
    it."""


def encode_prompts(rows: Sequence[PromptRow]) -> bytes:
    """The rows as one Parquet object."""
    return _write(
        pa.Table.from_pydict(
            {
                "prompt_id": [row.prompt_id for row in rows],
                "prompt": [row.prompt for row in rows],
                "prompt_ids": [list(row.prompt_ids) for row in rows],
                "columns": [json.dumps(row.columns) for row in rows],
            },
            schema=PROMPTS_SCHEMA,
        )
    )


def decode_prompts(body: bytes) -> list[PromptRow]:
    """The rows of a Parquet object that `encode_prompts` wrote."""
    return [
        PromptRow(
            prompt_id=row["prompt_id"],
            prompt=row["prompt"],
            prompt_ids=tuple(row["prompt_ids"]),
            columns=json.loads(row["columns"]),
        )
        for row in _read(body)
    ]


EXAMPLES_SCHEMA = pa.schema(
    [
        ("example_id", pa.string()),
        ("ids", pa.list_(pa.int32())),
        ("is_target", pa.list_(pa.bool_())),
    ]
)


@dataclass(frozen=True, kw_only=True)
class ExampleRow:
    """What a supervised run trains on, rendered and tokenised once."""

    example_id: str
    """`<split>-<row>` of the source, as for prompts."""
    ids: tuple[int, ...]
    is_target: tuple[bool, ...]
    """For each token, whether the loss is taken on it."""


class ExampleTable:
    """Examples in the compact form of their table; rows are made of those that are asked for."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def take(self, rows: Sequence[int]) -> list[ExampleRow]:
        """These rows, in this order."""
        return [
            ExampleRow(
                example_id=row["example_id"],
                ids=tuple(row["ids"]),
                is_target=tuple(row["is_target"]),
            )
            for row in self._table.take(list(rows)).to_pylist()
        ]


def encode_examples(rows: Sequence[ExampleRow]) -> bytes:
    """The rows as one Parquet object."""
    columns = {
        "example_id": [row.example_id for row in rows],
        "ids": [row.ids for row in rows],
        "is_target": [row.is_target for row in rows],
    }
    return _write(pa.Table.from_pydict(columns, schema=EXAMPLES_SCHEMA))


def decode_examples(body: bytes) -> ExampleTable:
    """The table of a Parquet object that `encode_examples` wrote."""
    return ExampleTable(_read_table(body))


def rollouts_schema(reward_names: Sequence[str]) -> pa.Schema:
    """One row a sample; `rewards` has one field for each part of the run's reward."""
    return pa.schema(
        [
            ("run_id", pa.string()),
            ("job_id", pa.string()),
            ("group_id", pa.string()),
            ("prompt_id", pa.string()),
            ("sample", pa.int32()),
            ("policy_version", pa.int32()),
            ("adapter_sha256", pa.string()),
            ("prompt_ids", pa.list_(pa.int32())),
            ("completion_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("finish_reason", pa.string()),
            ("prompt", pa.string()),
            ("completion", pa.string()),
            ("reward", pa.float64()),
            ("rewards", pa.struct([(name, pa.float64()) for name in reward_names])),
            ("generator_id", pa.string()),
            ("engine", pa.string()),
            ("sampled_at", pa.timestamp("us", tz="UTC")),
        ]
    )


def encode_rollouts(rows: Sequence[Rollout], reward_names: Sequence[str]) -> bytes:
    """The samples as one Parquet object."""
    schema = rollouts_schema(reward_names)
    return _write(pa.Table.from_pylist([row.model_dump() for row in rows], schema=schema))


def decode_rollouts(body: bytes) -> list[Rollout]:
    """The samples of a Parquet object that `encode_rollouts` wrote."""
    try:
        return [Rollout.model_validate(row) for row in _read(body)]
    except ValueError as error:
        raise IntegrityError(f"the rollouts do not have the expected form: {error}") from error


def _write(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _read(body: bytes) -> list[dict[str, Any]]:
    return _read_table(body).to_pylist()


def _read_table(body: bytes) -> pa.Table:
    try:
        return pq.read_table(io.BytesIO(body))
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(f"not a readable Parquet object: {error}") from error
