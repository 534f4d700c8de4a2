"""The Python client: the orchestrator's REST surface, one method a route, typed by the contracts.

    with OffbeatClient() as client:
        run = client.submit("examples/chain_sum.toml")
        client.wait(run.id)
        for point in client.metrics(run.id, ["reward"]).series["reward"]:
            print(point.step, point.value)

Reads, and writes that are safe to repeat, outlive a restart of the service: they are tried again
for `retry_for_s`. What goes wrong raises an error of the tree in `offbeat.errors`.
"""

import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import quote
from uuid import uuid4

import httpx
from httpx_sse import EventSource
from pydantic import SecretStr, ValidationError

from offbeat.contracts.base import Contract
from offbeat.contracts.chat import ChatMessage
from offbeat.contracts.completions import ChatCompletionChunk, ErrorEnvelope
from offbeat.contracts.jobs import JobStatus
from offbeat.contracts.plan import Plan, PlanOptions
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.runs import (
    CheckpointView,
    Diagnosis,
    GarbageView,
    MetricSeries,
    ModelView,
    Page,
    ReplayView,
    RolloutView,
    RunEvent,
    RunStatus,
    RunView,
    WorkerView,
)
from offbeat.downloads import save_adapter, save_model
from offbeat.errors import InvalidRequestError, UnavailableError
from offbeat.http import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, ServiceClient, raise_for_problem
from offbeat.pages import PAGE_ITEMS, all_pages
from offbeat.specs import load_spec, validate_spec

DEFAULT_URL = "http://127.0.0.1:8000"
RETRY_S = 30.0
"""A service that restarts is back well within it."""
COLLECT_TIMEOUT_S = 600.0
"""A collection lists every object of a run."""
POLL_S = 1.0
RECONNECT_WAIT_MAX_S = 5.0
RECONNECTS_MAX = 60
"""Vain attempts in a row to take up an event stream again: some five minutes."""

ANSWER_SILENCE_MAX_S = 180.0
"""A generator may have to load a model before it begins to answer."""

C = TypeVar("C", bound=Contract)
Query = Mapping[str, str | int | float | Sequence[str] | None]
Split = Literal["train", "eval"]


class OffbeatClient(ServiceClient):
    """A connection to one orchestrator. Use it in a `with` block, or `close` it."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        retry_for_s: float = RETRY_S,
    ) -> None:
        """`base_url` and `api_key` default to `OFFBEAT_URL` and `OFFBEAT_API_KEY`.

        `OFFBEAT_CA_FILE` names the PEM file of an authority to trust beside the machine's own.
        """
        url = base_url or os.environ.get("OFFBEAT_URL") or DEFAULT_URL
        key = api_key or os.environ.get("OFFBEAT_API_KEY")
        if not url.startswith(("http://", "https://")):
            raise InvalidRequestError(f"{url!r} is not an address: write http://host:port")
        ca_file = os.environ.get("OFFBEAT_CA_FILE")
        super().__init__(
            url, SecretStr(key) if key else None, ca_file=Path(ca_file) if ca_file else None
        )
        self._retry_for_s = retry_for_s

    def submit(
        self, spec: RunSpec | Mapping[str, object] | Path | str, idempotency_key: str | None = None
    ) -> RunView:
        """Create a run from a spec, validated or not, or from the path of a spec file.

        The same idempotency key gives the same run again. Raises `InvalidSpecError` before anything
        is sent where the spec is wrong.
        """
        if isinstance(spec, Path | str):
            spec = load_spec(Path(spec))
        elif not isinstance(spec, RunSpec):
            spec = validate_spec(dict(spec))
        response = self.call(
            "POST",
            "/v1/runs",
            json=spec.model_dump(mode="json", exclude_unset=True),
            headers={"idempotency-key": idempotency_key or uuid4().hex},
            retry_for_s=self._retry_for_s,
        )
        return self._read(RunView, response.content)

    def plan(
        self,
        spec: RunSpec | Mapping[str, object],
        gpus: str,
        nodes: int = 1,
        options: PlanOptions | None = None,
        *,
        config: Mapping[str, object] | None = None,
    ) -> Plan:
        """What the run would need on so many nodes with these GPUs each, `8xA100-80GB`.

        `config` is the `config.json` of a model that the service does not know by name.
        """
        if isinstance(spec, RunSpec):
            spec = spec.model_dump(mode="json", exclude_unset=True)
        body = {
            "spec": dict(spec),
            "gpus": gpus,
            "nodes": nodes,
            "options": (options or PlanOptions()).model_dump(exclude_unset=True),
            "config": None if config is None else dict(config),
        }
        response = self.call("POST", "/v1/plan", json=body, retry_for_s=self._retry_for_s)
        return self._read(Plan, response.content)

    def runs(
        self, status: RunStatus | None = None, limit: int = 50, after: str | None = None
    ) -> Page[RunView]:
        """A page of the runs, newest first."""
        return self._get(Page[RunView], "/v1/runs", status=status, limit=limit, after=after)

    def iter_runs(self, status: RunStatus | None = None) -> Iterator[RunView]:
        """All runs, newest first, page by page."""
        return all_pages(lambda after: self.runs(status, PAGE_ITEMS, after))

    def run(self, run_id: str) -> RunView:
        """One run."""
        return self._get(RunView, _path(run_id))

    def pause(self, run_id: str) -> RunView:
        """Start no more jobs; those under way finish and count."""
        return self._act(run_id, "pause")

    def resume(self, run_id: str) -> RunView:
        """Go on after a pause."""
        return self._act(run_id, "resume")

    def cancel(self, run_id: str) -> RunView:
        """End the run."""
        return self._act(run_id, "cancel")

    def retry(self, run_id: str) -> RunView:
        """Take a failed or cancelled run up again from its last version."""
        return self._act(run_id, "retry")

    def delete(self, run_id: str) -> None:
        """Remove a run that has ended, and everything that it has made."""
        self.call("DELETE", _path(run_id), retry_for_s=self._retry_for_s)

    def collect_garbage(self, run_id: str, *, dry_run: bool = False) -> GarbageView:
        """Remove at once what the run's `retention` gives up, or only say what that would be."""
        response = self.call(
            "POST", _path(run_id, "gc"), params={"dry_run": dry_run}, timeout=COLLECT_TIMEOUT_S
        )
        return self._read(GarbageView, response.content)

    def wait(self, run_id: str, timeout_s: float | None = None) -> RunView:
        """The run, once it has succeeded, failed or been cancelled; else TimeoutError."""
        deadline = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        while True:
            run = self.run(run_id)
            if run.status.is_final:
                return run
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{run_id} is still {run.status} after {timeout_s:g} s")
            time.sleep(max(0.0, min(POLL_S, deadline - time.monotonic())))

    def events(self, run_id: str, after: int = 0, limit: int = PAGE_ITEMS) -> Page[RunEvent]:
        """A page of the run's log, oldest first, from the entry after `after` on."""
        return self._get(Page[RunEvent], _path(run_id, "events"), after=after, limit=limit)

    def iter_events(self, run_id: str, after: int = 0) -> Iterator[RunEvent]:
        """The run's log so far, page by page."""
        return all_pages(lambda cursor: self.events(run_id, int(cursor or after)))

    def stream_events(self, run_id: str, after: int = 0) -> Iterator[RunEvent]:
        """The run's log as it is written, each entry once, until the run has ended.

        A connection that breaks is taken up again after the last entry seen. Raises
        `UnavailableError` after `RECONNECTS_MAX` vain attempts in a row.
        """
        failures = 0
        while True:
            try:
                for event in self._stream(run_id, after):
                    after, failures = event.id, 0
                    yield event
                ended = self.run(run_id).status.is_final
                failures = 0
            except UnavailableError:
                failures += 1
                if failures > RECONNECTS_MAX:
                    raise
                ended = False
            if ended:
                yield from self.iter_events(run_id, after)
                return
            time.sleep(min(RECONNECT_WAIT_MAX_S, 0.25 * 2 ** min(failures, 10)))

    def metrics(self, run_id: str, names: Sequence[str] | None = None) -> MetricSeries:
        """Series by name and step; all of them where no names are given."""
        return self._get(MetricSeries, _path(run_id, "metrics"), name=names)

    def rollouts(
        self,
        run_id: str,
        *,
        step: int | None = None,
        version: int | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        split: Split = "train",
        limit: int = 50,
        after: str | None = None,
    ) -> Page[RolloutView]:
        """A page of samples. It may be short where a filter leaves few: go by `has_more`."""
        return self._get(
            Page[RolloutView],
            _path(run_id, "rollouts"),
            step=step,
            version=version,
            min_reward=min_reward,
            max_reward=max_reward,
            split=split,
            limit=limit,
            after=after,
        )

    def checkpoints(self, run_id: str) -> tuple[CheckpointView, ...]:
        """Every policy version of the run, oldest first."""
        path = _path(run_id, "checkpoints")
        return tuple(
            all_pages(
                lambda after: self._get(Page[CheckpointView], path, limit=PAGE_ITEMS, after=after)
            )
        )

    def download_adapter(self, run_id: str, path: Path | str, version: int | None = None) -> None:
        """Fetch a version, the newest where none is named: as a zip where the path ends in `.zip`,
        else as a PEFT folder. Nothing appears under the path before all of it has arrived."""
        save_adapter(self._body(_path(run_id, "adapter"), version=version), Path(path))

    def model(self, run_id: str) -> ModelView:
        """The model that a run of full fine-tuning has made: its files, and where they lie."""
        return self._get(ModelView, _path(run_id, "model"))

    def download_model(self, run_id: str, folder: Path | str) -> ModelView:
        """Fetch the model that a run of full fine-tuning has made, as `from_pretrained` loads it.
        Called again, it goes on with the files that are not there yet."""
        model = self.model(run_id)
        save_model(model, lambda name: self._body(_path(run_id, "model", name)), Path(folder))
        return model

    def replay(self, run_id: str, step: int) -> ReplayView:
        """Have a trainer take a step again; ask `show_replay` for the answer."""
        response = self.call(
            "POST",
            _path(run_id, "replays"),
            json={"step": step},
            retry_for_s=self._retry_for_s,
        )
        return self._read(ReplayView, response.content)

    def show_replay(self, replay: ReplayView) -> ReplayView:
        """How a replay stands now."""
        return self._get(ReplayView, _path(replay.run_id, f"replays/{replay.id}"))

    def wait_for_replay(self, replay: ReplayView) -> ReplayView:
        """The replay, once it is over."""
        while replay.status in (JobStatus.QUEUED, JobStatus.LEASED):
            time.sleep(POLL_S)
            replay = self.show_replay(replay)
        return replay

    def chat(
        self,
        model: str,
        messages: Sequence[ChatMessage],
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> Generator[ChatCompletionChunk, None, None]:
        """The answer of a policy, `<run>` or `<run>@<version>`, chunk by chunk as it is made; the
        last one carries the usage. Closing the iterator stops the answer."""
        body = {
            "model": model,
            "messages": [message.model_dump() for message in messages],
            "temperature": temperature,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with self._open("/v1/chat/completions", {}, {}, body=body) as response:
            for event in EventSource(response).iter_sse():
                if event.data == "[DONE]":
                    return
                if event.data.startswith('{"error"'):
                    raise UnavailableError(self._read(ErrorEnvelope, event.data).error.message)
                yield self._read(ChatCompletionChunk, event.data)

    def diagnosis(self, run_id: str) -> Diagnosis:
        """What the run waits for."""
        return self._get(Diagnosis, _path(run_id, "diagnosis"))

    def workers(self) -> tuple[WorkerView, ...]:
        """The workers that reported lately."""
        return tuple(
            all_pages(lambda after: self._get(Page[WorkerView], "/v1/workers", after=after))
        )

    def _act(self, run_id: str, action: str) -> RunView:
        response = self.call("POST", _path(run_id, action), retry_for_s=self._retry_for_s)
        return self._read(RunView, response.content)

    def _get(
        self, answer: type[C], path: str, **query: str | int | float | Sequence[str] | None
    ) -> C:
        response = self.call("GET", path, params=_given(query), retry_for_s=self._retry_for_s)
        return self._read(answer, response.content)

    def _read(self, answer: type[C], body: bytes | str) -> C:
        try:
            return answer.model_validate_json(body)
        except ValidationError as error:
            raise UnavailableError(
                f"{self.http.base_url} does not answer like an Offbeat orchestrator of this version"
            ) from error

    def _stream(self, run_id: str, after: int) -> Iterator[RunEvent]:
        headers = {"accept": "text/event-stream", "last-event-id": str(after)}
        with self._open(_path(run_id, "events"), {"after": after}, headers) as response:
            for message in EventSource(response).iter_sse():
                if message.data:
                    yield self._read(RunEvent, message.data)

    @contextmanager
    def _body(self, path: str, **query: int | None) -> Iterator[Iterator[bytes]]:
        with self._open(path, query, {}) as response:
            yield response.iter_bytes()

    @contextmanager
    def _open(
        self,
        path: str,
        query: Query,
        headers: Mapping[str, str],
        *,
        body: Mapping[str, object] | None = None,
    ) -> Iterator[httpx.Response]:
        """An answer whose body is read as it comes; to a POST where there is a body to send."""
        method = "GET" if body is None else "POST"
        silence_max_s = READ_TIMEOUT_S if body is None else ANSWER_SILENCE_MAX_S
        timeout = httpx.Timeout(silence_max_s, connect=CONNECT_TIMEOUT_S)
        request = {"params": _given(query), "headers": headers, "json": body, "timeout": timeout}
        try:
            with self.http.stream(method, path, **request) as response:
                if response.is_error:
                    response.read()
                raise_for_problem(response)
                yield response
        except httpx.TransportError as error:
            raise UnavailableError(f"{self.http.base_url} broke off: {error!r}") from error


def _path(run_id: str, *rest: str) -> str:
    return "/".join(("/v1/runs", quote(run_id, safe=""), *rest))


def _given(query: Query) -> dict[str, str | int | float | Sequence[str]]:
    return {key: value for key, value in query.items() if value is not None}
