"""Samples from a vLLM server: one request a sample, token ids in and out.

Each request names its adapter, its seed and every sampling parameter, so that nothing depends on
the server's defaults or on the order of the batch. Work that is no longer wanted is ended by
closing its connections, upon which vLLM aborts the sequences.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from http import HTTPStatus

import httpx
from pydantic import BaseModel, JsonValue, ValidationError

from offbeat.errors import IntegrityError, OffbeatError, PermanentJobError, UnavailableError
from services.generator.engines.base import Completion, SampleRequest, Sampling, not_heard
from services.generator.engines.vllm_http import (
    CONNECT_TIMEOUT_S,
    MESSAGE_CHARS_MAX,
    ServerAddress,
    message_of,
    refusal,
    unreachable,
)

PATH = "/v1/completions"
CHECK_INTERVAL_S = 0.5
"""How soon work notices that it was taken away."""
URGENT, NOT_URGENT = -1, 0
"""vLLM's priorities: lower goes first, given `--scheduling-policy priority`."""
LOGPROB_FLOOR = -9999.0
"""What vLLM writes for minus infinity, which no sampled token can have."""

STREAM_PART, STREAM_ERROR = "data: {", 'data: {"error"'

Body = dict[str, JsonValue]
OnTokens = Callable[[Sequence[int]], None]


class _Logprobs(BaseModel):
    token_logprobs: tuple[float, ...]


class _Choice(BaseModel):
    token_ids: tuple[int, ...]
    logprobs: _Logprobs
    finish_reason: str | None = None
    """None in the parts of a stream but the last."""


class _Answer(BaseModel):
    model: str
    choices: tuple[_Choice]


def completion_bodies(
    requests: Sequence[SampleRequest],
    model: str,
    sampling: Sampling,
    *,
    stop_ids: Sequence[int] = (),
    priority: int = NOT_URGENT,
) -> list[Body]:
    """A request body for each seed of each request, in order."""
    shared: Body = {
        "model": model,
        "n": 1,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(stop_ids),
        "skip_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "priority": priority,
    }
    return [
        {**shared, "prompt": list(request.prompt_ids), "seed": seed}
        for request in requests
        for seed in request.seeds
    ]


def complete(
    address: ServerAddress,
    bodies: Sequence[Body],
    *,
    at_once: int,
    timeout_s: float,
    check: Callable[[], None],
    on_tokens: OnTokens = not_heard,
) -> list[Completion]:
    """The completions of the bodies, in order; the first failure, or `check`, ends them all.

    The first is streamed where somebody hears its tokens. `UnavailableError` where trying again may
    help, `IntegrityError` for an answer of another model or without finite log-probabilities.
    """
    return asyncio.run(_complete(address, bodies, at_once, timeout_s, check, on_tokens))


async def _complete(
    address: ServerAddress,
    bodies: Sequence[Body],
    at_once: int,
    timeout_s: float,
    check: Callable[[], None],
    on_tokens: OnTokens,
) -> list[Completion]:
    slots = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(
        base_url=address.url,
        headers=address.headers,
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None),
        limits=httpx.Limits(max_connections=at_once),
        # To read the certificates takes longer than a canary.
        verify=address.url.startswith("https:"),
    ) as http:

        async def one(body: Body) -> Completion:
            async with slots:
                try:
                    if on_tokens is not not_heard and body is bodies[0]:
                        return await _streamed(http, body, on_tokens)
                    return await _whole(http, body)
                except httpx.TransportError as error:
                    raise unreachable(address, error) from error

        check()
        tasks = [asyncio.create_task(one(body)) for body in bodies]
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=CHECK_INTERVAL_S, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
                check()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in tasks]


async def _whole(http: httpx.AsyncClient, body: Body) -> Completion:
    response = await http.post(PATH, json=body)
    if response.is_error:
        raise completion_refusal(response.status_code, message_of(response))
    return completion_of([parse(response.content)], body)


async def _streamed(http: httpx.AsyncClient, body: Body, on_tokens: OnTokens) -> Completion:
    parts: list[_Answer] = []
    async with http.stream("POST", PATH, json={**body, "stream": True}) as response:
        if response.is_error:
            await response.aread()
            raise completion_refusal(response.status_code, message_of(response))
        async for line in response.aiter_lines():
            if line.startswith(STREAM_ERROR):
                raise UnavailableError(f"vLLM broke off: {line[:MESSAGE_CHARS_MAX]}")
            if line.startswith(STREAM_PART):
                parts.append(parse(line.removeprefix("data: ").encode()))
                on_tokens(parts[-1].choices[0].token_ids)
    if not parts:
        raise UnavailableError("vLLM ended a stream without a token: try again")
    return completion_of(parts, body)


def completion_refusal(status: int, message: str) -> OffbeatError:
    """What an error of this route stands for."""
    if status == HTTPStatus.NOT_FOUND:
        return UnavailableError(f"{message} vLLM was restarted: the adapter is loaded again")
    if "not JSON compliant" in message:
        return IntegrityError("the policy's log-probabilities are not finite")
    if "priority" in message:
        return PermanentJobError(f"{message}: start vLLM with --scheduling-policy priority")
    return refusal(status, message)


def parse(content: bytes) -> _Answer:
    """An answer, or a part of one."""
    try:
        return _Answer.model_validate_json(content)
    except ValidationError as error:
        raise PermanentJobError(
            f"vLLM's answer lacks token ids or log-probabilities: {error}"
        ) from error


def completion_of(parts: Sequence[_Answer], body: Body) -> Completion:
    """The sample in the parts of the answer to this body."""
    ids = tuple(token for part in parts for token in part.choices[0].token_ids)
    logprobs = tuple(value for part in parts for value in part.choices[0].logprobs.token_logprobs)
    model, finish_reason = parts[-1].model, parts[-1].choices[0].finish_reason
    if model != body["model"]:
        raise IntegrityError(f"vLLM was asked for {body['model']} and answered as {model}")
    if finish_reason not in ("stop", "length"):
        raise UnavailableError(f"vLLM ended a sample with {finish_reason!r}: try again")
    if not ids or len(ids) != len(logprobs):
        raise IntegrityError(f"vLLM gave {len(logprobs)} log-probabilities for {len(ids)} tokens")
    if not all(math.isfinite(value) and value > LOGPROB_FLOOR for value in logprobs):
        raise IntegrityError("the policy's log-probabilities are not finite")
    if finish_reason == "length" and len(ids) != body["max_tokens"]:
        raise PermanentJobError(
            f"vLLM ended a sample after {len(ids)} of {body['max_tokens']} tokens: "
            "start it with --generation-config vllm and a larger --max-model-len"
        )
    return Completion(ids=ids, logprobs=logprobs, finish_reason=finish_reason)
