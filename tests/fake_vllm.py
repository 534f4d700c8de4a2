"""A vLLM 0.32 server without vLLM: its routes and its words over the tiny model, with faults.

Adapters are really read and computed with, by the transformers engine, so that canaries hold or
fail for the right reason. As in vLLM, an unloaded name only leaves the table of the server, the
engine keeps the adapters used last, and it reads the folder of another one again when a request
names it.
"""

import argparse
import asyncio
import hashlib
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from offbeat.contracts.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from services.generator.engines.base import Completion, SampleRequest, Sampling
from tests.policies import policy_tensors, write_policy
from tests.servers import serve
from tests.tiny_engine import TinyEngine
from tests.vllm_answers import answer, card, error, streamed

BASE = "base"
POLL_S = 0.01
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
WORKER_FAILED = (
    "Call to add_lora method failed: Worker failed with error '{}', please check the stack trace "
    "above for the root cause"
)


class Refusal(Exception):
    """An error that is answered before the route is reached."""


class EngineDied(Exception):
    """What vLLM's engine does not survive."""


@dataclass(kw_only=True)
class FakeVllm:
    """What the server is and does; every field may be changed while it runs."""

    model_folder: Path
    served_name: str = "tiny"
    version: str = "0.32.0"
    api_key: str | None = None
    max_loras: int = 8
    max_cpu_loras: int = 64
    max_lora_rank: int = 64
    max_model_len: int = 256
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    lora_enabled: bool = True
    has_lora_routes: bool = True
    has_priorities: bool = True

    starting: bool = False
    """Does not answer its health route yet."""
    is_dead: bool = False
    """The engine has died: every request fails."""
    hangs: bool = False
    """Completions do not end."""
    loads_failed: int = 0
    """So many loads are answered with 500."""
    unloads_failed: int = 0
    """So many unloads are answered with 500."""
    loads_lost: int = 0
    """So many loads are answered with 200 and have no effect."""
    loads_refused: str | None = None
    """Why each load is answered with 400."""
    routes_to: str | None = None
    """Whatever adapter is asked for, this one computes; the answer names the one asked for."""
    answers_as: str | None = None
    """What answers name, whatever was asked for."""
    ends_with: str | None = None
    """The finish reason of every completion."""
    tokens_max: int | None = None
    """Completions end after so many tokens, as under a generation config of the model."""
    fails_every: int | None = None
    """Every so manieth completion is answered with 500."""

    roots: dict[str, Path] = field(default_factory=dict)
    """The table of the server: name to folder."""
    contents: list[tuple[str, str]] = field(default_factory=list)
    """Name and sha256 of every load."""
    reads: Counter[str] = field(default_factory=Counter)
    """How often the folder of a name was read."""
    unloads: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Every completion that was asked for."""
    aborted: int = 0
    """Completions whose client went away."""
    running: int = 0
    running_most: int = 0
    unready_answers: int = 0
    """How often its health route has said that it is not ready."""

    def __post_init__(self) -> None:
        self._engine = TinyEngine(self.model_folder)
        with TemporaryDirectory() as folder:
            self._engine.load(BASE, write_policy(Path(folder) / BASE, policy_tensors(0)))
        self._cache: OrderedDict[str, str] = OrderedDict()
        """Adapters in the engine: name to the engine's own name of it; used last is last."""
        self._numbers = count()

    def restart(self) -> None:
        """As a new process at the old address: no adapters."""
        self.roots.clear()
        for own_name in self._cache.values():
            self._engine.unload(own_name)
        self._cache.clear()
        self.is_dead = self.hangs = False

    def reset(self) -> None:
        """A new process without faults; nothing is recorded yet."""
        self.restart()
        for each in fields(self):
            if each.default is not MISSING:
                setattr(self, each.name, each.default)
            elif each.default_factory is not MISSING:
                setattr(self, each.name, each.default_factory())

    def close(self) -> None:
        """End the engine's thread."""
        self._engine.close()

    def read(self, name: str, folder: Path) -> None:
        """Bring an adapter into the engine, as vLLM's worker does."""
        self.reads[name] += 1
        own_name = f"{name}#{next(self._numbers)}"
        self._engine.load(own_name, folder)
        if len(self._cache) >= self.max_cpu_loras:
            self._engine.unload(self._cache.popitem(last=False)[1])
        self._cache[name] = own_name

    def compute(self, name: str, body: dict[str, Any]) -> Completion:
        """One sample by the adapter, or by the base model."""
        name = self.routes_to or name
        own_name = BASE
        if name != self.served_name:
            if name not in self._cache:
                folder = self.roots[name]
                if not folder.is_dir():
                    raise EngineDied
                self.read(name, folder)
            self._cache.move_to_end(name)
            own_name = self._cache[name]
        greedy = body["temperature"] == 0
        if self.logprobs_mode == "raw_logprobs" and body["top_k"] == 1:
            greedy = True  # the most likely token, with its plain log-probability
        sampling = Sampling(
            max_new_tokens=min(body["max_tokens"], self.tokens_max or body["max_tokens"]),
            temperature=0.0 if greedy else body["temperature"],
            top_k=body["top_k"],
            top_p=body["top_p"],
            stop=tuple(body["stop"]),
        )
        request = SampleRequest(prompt_ids=tuple(body["prompt"]), seeds=(body["seed"],))
        ((completion,),) = self._engine.generate([request], own_name, sampling)
        return completion

    def app(self) -> FastAPI:
        """The application over this state, which outlives it."""
        app = FastAPI(dependencies=[Depends(self._guard)])
        app.exception_handler(Refusal)(lambda _, refusal: error(*refusal.args))
        app.get("/health")(self._health)
        app.get("/version")(self._version)
        app.get("/metrics")(self._metrics)
        app.get("/v1/models")(self._models)
        app.post("/v1/completions")(self._complete)
        app.post("/v1/load_lora_adapter")(self._load)
        app.post("/v1/unload_lora_adapter")(self._unload)
        return app

    async def _guard(self, request: Request) -> None:
        path, key = request.url.path, request.headers.get("authorization")
        if "lora_adapter" in path and not self.has_lora_routes:
            raise Refusal(404, "Not Found", "Not Found")
        if path.startswith("/v1") and self.api_key and key != f"Bearer {self.api_key}":
            raise Refusal(401, "Unauthorized", "Unauthorized")

    async def _health(self) -> Response:
        if self.starting or self.is_dead:
            self.unready_answers += 1
            return Response(status_code=503)
        return Response(status_code=200)

    async def _version(self) -> dict[str, str]:
        return {"version": self.version}

    async def _metrics(self) -> PlainTextResponse:
        labels = f'max_lora="{self.max_loras}",running_lora_adapters="",waiting_lora_adapters=""'
        return PlainTextResponse(f"vllm:lora_requests_info{{{labels}}} {time.time()}\n")

    async def _models(self) -> dict[str, Any]:
        cards = [card(self.served_name, str(self.model_folder), None, self.max_model_len)]
        cards += [card(name, str(root), self.served_name) for name, root in self.roots.items()]
        return {"object": "list", "data": cards}

    async def _load(self, body: dict[str, str]) -> Response:
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.roots:
            return error(
                400,
                "InvalidUserInput",
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
            )
        if self.loads_refused:
            return error(400, "BadRequestError", self.loads_refused)
        if not self.lora_enabled:
            reason = "LoRA is not enabled. Use --enable-lora to enable LoRA."
            return error(500, "InternalServerError", WORKER_FAILED.format(reason))
        if self.loads_failed:
            self.loads_failed -= 1
            return error(500, "InternalServerError", WORKER_FAILED.format("out of memory"))
        if not (folder / ADAPTER_CONFIG).is_file():
            return error(
                404, "NotFoundError", f"Loading lora {name} failed: No adapter found for {folder}"
            )
        rank = json.loads((folder / ADAPTER_CONFIG).read_text())["r"]
        if rank > self.max_lora_rank:
            reason = f"LoRA rank {rank} is greater than max_lora_rank {self.max_lora_rank}."
            return error(500, "InternalServerError", WORKER_FAILED.format(reason))
        digest = hashlib.sha256((folder / ADAPTER_WEIGHTS).read_bytes()).hexdigest()
        self.contents.append((name, digest))
        if self.loads_lost:
            self.loads_lost -= 1
        else:
            self.read(name, folder)
            self.roots[name] = folder
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, body: dict[str, str]) -> Response:
        name = body["lora_name"]
        if name not in self.roots:
            return error(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        if self.unloads_failed:
            self.unloads_failed -= 1
            return error(500, "InternalServerError", "Internal server error")
        del self.roots[name]
        self.unloads.append(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        name = body["model"]
        if self.is_dead:
            return error(500, "InternalServerError", DEAD)
        if name not in self.roots and name != self.served_name:
            message = f"The model `{name}` does not exist. Valid aliases: {self.served_name}."
            return error(404, "NotFoundError", message, "model")
        if body["priority"] and not self.has_priorities:
            message = "Got priority -1 but Priority scheduling is not enabled."
            return error(400, "BadRequestError", message)
        if self.fails_every and len(self.bodies) % self.fails_every == 0:
            return error(500, "InternalServerError", "Internal server error")
        self.running += 1
        self.running_most = max(self.running, self.running_most)
        try:
            completion = await self._until_done_or_gone(request, name, body)
        except EngineDied:
            self.is_dead = True
            return error(500, "InternalServerError", DEAD)
        finally:
            self.running -= 1
        if completion is None:
            self.aborted += 1
            return Response(status_code=499)
        if body.get("stream"):
            chunks = streamed(name, completion)
            return StreamingResponse(chunks, media_type="text/event-stream")
        reason = self.ends_with or completion.finish_reason
        return JSONResponse(answer(self.answers_as or name, completion, reason, body["prompt"]))

    async def _until_done_or_gone(
        self, request: Request, name: str, body: dict[str, Any]
    ) -> Completion | None:
        while self.hangs and not await request.is_disconnected():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(POLL_S)
        if await request.is_disconnected():
            return None
        if self.is_dead:
            raise EngineDied
        return await asyncio.to_thread(self.compute, name, body)


@contextmanager
def running_vllm(model_folder: Path, **fields: Any) -> Iterator[tuple[FakeVllm, str]]:
    """The fake on a free port, and its URL."""
    fake = FakeVllm(model_folder=model_folder, **fields)
    try:
        with serve(fake.app()) as url:
            yield fake, url
    finally:
        fake.close()


def main() -> None:
    """Serve as `python -m vllm.entrypoints.openai.api_server` does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--served-model-name")
    for name in ("--port", "--max-loras", "--max-lora-rank"):
        parser.add_argument(name, type=int)
    known, _ = parser.parse_known_args()
    fake = FakeVllm(
        model_folder=known.model,
        served_name=known.served_model_name,
        max_loras=known.max_loras,
        max_lora_rank=known.max_lora_rank,
    )
    uvicorn.run(fake.app(), host="127.0.0.1", port=known.port, log_level="info")


if __name__ == "__main__":
    main()
