"""The `prepare` job with a real model, a real store and a real scorer."""

import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import JsonValue

from offbeat.contracts.jobs import PrepareInput, PrepareOutput
from offbeat.contracts.leases import Lease
from offbeat.contracts.run_spec import RunSpec
from offbeat.errors import (
    InvalidDataError,
    InvalidRequestError,
    LeaseLostError,
    PermanentJobError,
)
from offbeat.objects import S3ObjectStore
from offbeat.rewards.scorer import RewardScorer
from offbeat.tables import decode_prompts
from offbeat.worker import JobContext
from services.generator.prepare import max_prompt_tokens, prepare

EXACT: dict[str, JsonValue] = {"type": "exact_match", "extract": "last_number"}


@pytest.fixture(scope="module")
def scorer() -> Iterator[RewardScorer]:
    with RewardScorer() as scorer:
        yield scorer


class Job:
    """Prepares runs of the tiny model."""

    def __init__(
        self, store: S3ObjectStore, scorer: RewardScorer, model: Path, folder: Path, run_id: str
    ) -> None:
        self.store = store
        self.scorer = scorer
        self.model = model
        self.folder = folder
        self.run_id = run_id

    def context(
        self,
        data: JsonValue,
        *,
        reward: JsonValue = EXACT,
        max_new_tokens: int = 64,
        attempt: int = 1,
    ) -> JobContext:
        spec = {
            "model": {"id": str(self.model)},
            "data": data,
            "rewards": [reward],
            "rollout": {"max_new_tokens": max_new_tokens},
            "train": {"steps": 1},
        }
        return JobContext(
            Lease(
                job_id="job-1",
                attempt=attempt,
                run_id=self.run_id,
                run_name="run",
                spec=RunSpec.model_validate_json(json.dumps(spec)),
                input=PrepareInput(),
                expires_at=datetime.now(UTC),
                heartbeat_interval_s=10,
            )
        )

    def run(self, context: JobContext) -> PrepareOutput:
        return prepare(context, store=self.store, models_dir=self.folder, scorer=self.scorer)


@pytest.fixture
def job(
    store: S3ObjectStore, scorer: RewardScorer, tiny_model: Path, tmp_path: Path, run_id: str
) -> Job:
    return Job(store, scorer, tiny_model, tmp_path, run_id)


def test_gym_prompts_are_the_same_bytes_for_the_same_seed(job: Job, run_id: str) -> None:
    data = {
        "source": "reasoning_gym",
        "tasks": [{"name": "chain_sum", "config": {"max_digits": 1, "max_terms": 2}}],
        "size": 40,
        "eval_size": 8,
    }
    reward: JsonValue = {"type": "reasoning_gym", "extract": "last_number"}
    first = job.run(job.context(data, reward=reward))
    again = job.run(job.context(data, reward=reward, attempt=2))
    stored = [job.store.get(first.prompts_key), job.store.get(first.eval_prompts_key or "")]
    assert first == PrepareOutput(
        prompts_key=f"runs/{run_id}/prompts/job-1-1/train.parquet",
        num_prompts=40,
        eval_prompts_key=f"runs/{run_id}/prompts/job-1-1/eval.parquet",
        num_eval_prompts=8,
        stored_bytes=sum(map(len, stored)),
    )
    assert again.eval_prompts_key == f"runs/{run_id}/prompts/job-1-2/eval.parquet"
    bodies = [job.store.get(output.prompts_key) for output in (first, again)]
    assert bodies[0] == bodies[1]
    rows = decode_prompts(bodies[0])
    assert rows[0].prompt == (
        f"<|im_start|>user\n{rows[0].columns['prompt']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len({row.prompt_id for row in rows}) == 40


def test_jsonl_from_another_bucket_is_read_and_polars_reads_the_table(job: Job) -> None:
    job.store.with_bucket("data").create_bucket()
    job.store.with_bucket("data").put(
        f"{job.run_id}.jsonl", b'{"q": "1+1?", "answer": 2}\n{"q": "2+2?", "answer": "4"}\n'
    )
    uri = f"s3://data/{job.run_id}.jsonl"
    data = {"source": "jsonl", "uri": uri, "prompt_field": "q", "shuffle": False}
    output = job.run(job.context(data))
    assert (output.num_prompts, output.eval_prompts_key) == (2, None)
    table = polars.read_parquet(io.BytesIO(job.store.get(output.prompts_key)))
    assert table["prompt_id"].to_list() == ["train-0", "train-1"]
    assert table["columns"].to_list() == [
        '{"answer": 2, "prompt": "1+1?"}',
        '{"answer": "4", "prompt": "2+2?"}',
    ]
    assert table["prompt_ids"].list.len().to_list() == [23, 23]


def test_parquet_from_the_store_is_read(job: Job) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": [1, 2]}), buffer)
    job.store.put(f"{job.run_id}/rows.parquet", buffer.getvalue())
    uri = f"s3://{job.store.bucket}/{job.run_id}/rows.parquet"
    assert job.run(job.context({"source": "parquet", "uri": uri})).num_prompts == 2


def test_a_folder_of_a_hugging_face_dataset_is_read(job: Job, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    data: dict[str, JsonValue] = {"source": "huggingface", "dataset": str(tmp_path / "set")}
    assert job.run(job.context(data)).num_prompts == 1
    with pytest.raises(InvalidDataError, match=r"split 'test' cannot be loaded: .*\['train'\]"):
        job.run(job.context({**data, "split": "test"}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"source": "jsonl", "uri": "s3://tests/none.jsonl"}, "there is no object s3://tests/none"),
        ({"source": "jsonl", "uri": "s3://no-bucket/none.jsonl"}, "there is no object s3://no-b"),
        ({"source": "jsonl", "uri": "s3://tests"}, "write s3://bucket/key"),
        (
            {"source": "inline", "rows": [{"prompt": "a", "answer": "1"}, {"prompt": "b"}]},
            r"row 1: reward 'exact_match' finds no column 'answer' \(it has only the prompt\)",
        ),
        (
            {"source": "inline", "rows": [{"prompt": "x" * 174, "answer": "1"}]},
            "row 0: the prompt has 193 tokens and the model has room for 192 beside",
        ),
    ],
)
def test_wrong_data_fails_with_the_row(data: JsonValue, message: str, job: Job) -> None:
    with pytest.raises(InvalidDataError, match=message):
        job.run(job.context(data))
    assert list(job.store.list(f"runs/{job.run_id}/")) == []


ONE_ROW: dict[str, JsonValue] = {"source": "inline", "rows": [{"prompt": "a", "answer": "1"}]}


def test_a_reward_that_cannot_work_fails_before_any_score(job: Job) -> None:
    lost: JsonValue = {"type": "python", "path": "no.such:fn", "name": "mine"}
    with pytest.raises(PermanentJobError, match=r"reward 'mine': cannot import 'no.such'"):
        job.run(job.context(ONE_ROW, reward=lost))


def test_completions_that_leave_no_room_for_a_prompt_are_refused(job: Job, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"max_new_tokens \(256\) leaves no room.* has 256"
    ):
        job.run(job.context(ONE_ROW, max_new_tokens=256))
    config = tmp_path / "config.json"
    for written, tokens_max in (
        ({"text_config": {"max_position_embeddings": 100}}, 90),
        ({"n_positions": 50}, 40),
        ({}, None),
    ):
        config.write_text(json.dumps(written))
        assert max_prompt_tokens(tmp_path, 10) == tokens_max


def test_a_job_that_was_taken_away_stops_between_rows(job: Job, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "1"}\n' * 2001)
    context = job.context({"source": "jsonl", "uri": str(rows)})
    context.revoke()
    with pytest.raises(LeaseLostError):
        job.run(context)
