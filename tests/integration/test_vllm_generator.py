"""A generator process on a vLLM server, from the queue's message to the accepted result.

Everything is real but the server, which is the fake one over the tiny model, and the orchestrator,
of which only the routes of workers are here.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from pydantic import JsonValue, SecretStr

from offbeat import keys
from offbeat.contracts.jobs import (
    GenerateInput,
    GenerateOutput,
    GroupRequest,
    JobKind,
    JobMessage,
)
from offbeat.contracts.leases import HeartbeatReply, Lease
from offbeat.objects import S3ObjectStore
from offbeat.queue import create_celery, enqueue
from offbeat.settings import ObjectStoreSettings, QueueSettings
from offbeat.tables import PromptRow, decode_rollouts, encode_prompts
from tests.fake_vllm import running_vllm
from tests.policies import Reference, policy_tensors, upload_policy
from tests.servers import serve
from tests.specs import spec
from tests.waiting import wait_until
from tests.weight_proxy import running_proxy

DEADLINE_S = 240.0
"""The process imports torch and transformers."""
PROMPTS = [
    PromptRow(prompt_id="train-0", prompt="p", prompt_ids=(40, 41, 42), columns={"answer": "e"})
]


@dataclass(kw_only=True)
class Jobs:
    """The orchestrator's `/internal`: leases that are handed out, and what comes back."""

    leases: dict[str, Lease]
    results: dict[str, dict[str, JsonValue]] = field(default_factory=dict)
    events: list[dict[str, JsonValue]] = field(default_factory=list)
    engines: set[str] = field(default_factory=set)
    """What workers report."""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.put("/internal/workers/{worker_id}")
        async def report(request: Request) -> None:
            told = await request.json()
            self.engines.add(told["engine"])
            self.events += told["events"]

        @app.post("/internal/jobs/{job_id}/lease")
        async def lease(job_id: str) -> Response:
            if job_id not in self.leases:  # a message that an earlier test has left behind
                return Response(status_code=404)
            return Response(self.leases[job_id].model_dump_json(), media_type="application/json")

        @app.post("/internal/jobs/{job_id}/heartbeat")
        async def heartbeat(job_id: str) -> HeartbeatReply:
            return HeartbeatReply()

        @app.post("/internal/jobs/{job_id}/{end}")
        async def ended(job_id: str, end: str, request: Request) -> None:
            self.results[job_id] = {"end": end, **await request.json()}

        return app


@contextmanager
def running_generator(environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.generator"],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=60)


def environment_of(
    vllm_url: str, folder: Path, s3: ObjectStoreSettings, **addresses: str
) -> dict[str, str]:
    return {
        "OFFBEAT_ENGINE": "vllm",
        "OFFBEAT_VLLM_URL": vllm_url,
        "OFFBEAT_VLLM_MAX_LORA_RANK": "16",
        "OFFBEAT_WORKER_ID": "generator-1",
        "OFFBEAT_DATA_DIR": str(folder / "data"),
        "OFFBEAT_MODEL_CACHE_DIR": str(folder / "models"),
        "OFFBEAT_S3_ENDPOINT_URL": str(s3.endpoint_url),
        "OFFBEAT_S3_BUCKET": s3.bucket,
        "OFFBEAT_S3_ACCESS_KEY_ID": s3.access_key_id,
        "OFFBEAT_S3_SECRET_ACCESS_KEY": s3.secret_access_key.get_secret_value(),
        "OMP_NUM_THREADS": "1",
        **addresses,
    }


def lease_of(run_id: str, job_id: str, model_folder: Path, **changes: Any) -> Lease:
    sections: dict[str, Any] = {
        "model": {"id": str(model_folder), "dtype": "float32"},
        "rewards": [{"type": "regex", "name": "letter", "pattern": "[a-m]"}],
        "rollout": {"group_size": 3},
    }
    return Lease(
        job_id=job_id,
        attempt=1,
        run_id=run_id,
        run_name="test",
        spec=spec(**{**sections, **changes}),
        input=GenerateInput(
            prompts_key=keys.prompts(run_id, "prepare", 1, "train"),
            groups=(GroupRequest(group_id="g-0", prompt_row=0, seed=10),),
            min_version=1,
        ),
        expires_at=datetime.now(UTC),
        heartbeat_interval_s=5.0,
    )


def test_a_job_goes_from_the_queue_through_vllm_to_its_rows(
    store: S3ObjectStore,
    s3_settings: ObjectStoreSettings,
    valkey_url: str,
    tiny_model: Path,
    tmp_path: Path,
    run_id: str,
) -> None:
    """Beside it a job of a run that keeps more versions in flight than the server has room for."""
    jobs = Jobs(
        leases={
            "job-1": lease_of(run_id, "job-1", tiny_model),
            "job-2": lease_of(run_id, "job-2", tiny_model, staleness={"max_versions": 7}),
        }
    )
    with (
        running_proxy(store, tmp_path) as proxy,
        running_vllm(tiny_model, served_name=str(tiny_model)) as (fake, vllm_url),
        serve(jobs.app()) as orchestrator_url,
        running_generator(
            environment_of(
                vllm_url,
                tmp_path,
                s3_settings,
                OFFBEAT_REDIS_URL=valkey_url,
                OFFBEAT_ORCHESTRATOR_URL=orchestrator_url,
                OFFBEAT_WEIGHT_PROXY_URL=proxy.url,
            ),
            tmp_path / "log",
        ) as process,
    ):
        reference = Reference(tiny_model)
        for version in (0, 1):
            manifest = upload_policy(store, run_id, version, reference.canary(version))
            proxy.client.publish(manifest.model_copy(update={"base_model": str(tiny_model)}))
        store.put(keys.prompts(run_id, "prepare", 1, "train"), encode_prompts(PROMPTS))
        celery = create_celery(QueueSettings(redis_url=SecretStr(valkey_url)), "test")
        for job_id in jobs.leases:
            enqueue(celery, JobKind.GENERATE, "default", JobMessage(job_id=job_id, attempt=1))
        wait_until(lambda: len(jobs.results) == 2 or process.poll() is not None, DEADLINE_S)
        assert process.poll() is None, (tmp_path / "log").read_text()
        wait_until(lambda: jobs.engines == {"vllm"})

    assert jobs.results["job-1"]["end"] == "complete", jobs.results["job-1"]
    output = GenerateOutput.model_validate(jobs.results["job-1"]["output"])
    rows = decode_rollouts(store.get(output.rollouts_key))
    assert [(row.group_id, row.sample, row.engine) for row in rows] == [
        ("g-0", sample, "vllm") for sample in range(3)
    ]
    reference = Reference(tiny_model, policy_tensors(1))
    for row in rows:
        assert (row.policy_version, row.adapter_sha256) == (1, manifest.adapter_sha256)
        expected = reference.logprobs(row.prompt_ids, row.completion_ids)
        assert row.logprobs == pytest.approx(expected, abs=1e-4)
    asked = [body for body in fake.bodies if body["prompt"] == [40, 41, 42]]
    assert sorted((body["model"], body["seed"]) for body in asked) == [
        (f"{run_id}-v1", seed) for seed in (10, 11, 12)
    ]
    assert {str(event["kind"]) for event in jobs.events} == {"version_served"}

    refused = jobs.results["job-2"]
    assert (refused["end"], refused["permanent"]) == ("fail", True)
    assert "staleness.max_versions = 7 needs 9 adapters" in str(refused["message"])
    assert fake.roots == {}, "what was loaded is unloaded at the end"


def test_a_wrong_flag_ends_the_process_with_its_name(
    s3_settings: ObjectStoreSettings, tiny_model: Path, tmp_path: Path
) -> None:
    with running_vllm(tiny_model, logprobs_mode="raw_logprobs") as (_, vllm_url):
        environment = environment_of(
            vllm_url, tmp_path, s3_settings, OFFBEAT_WEIGHT_PROXY_URL="http://127.0.0.1:1"
        )
        with running_generator(environment, tmp_path / "log") as process:
            assert process.wait(timeout=DEADLINE_S) != 0
    assert "start it with --logprobs-mode processed_logprobs" in (tmp_path / "log").read_text()
