"""The words of a vLLM 0.32 server: the bodies of its answers, as recorded in `tests/contracts`."""

import json
import time
from collections.abc import Iterator
from typing import Any

from fastapi.responses import JSONResponse

from services.generator.engines.base import Completion


def answer(
    name: str, completion: Completion, finish_reason: str, prompt: list[int]
) -> dict[str, Any]:
    """A completion in one piece."""
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
        "choices": [
            {
                "index": 0,
                "text": "",
                "logprobs": {
                    "text_offset": [0 for _ in completion.ids],
                    "token_logprobs": list(completion.logprobs),
                    "tokens": ["" for _ in completion.ids],
                    "top_logprobs": [{"": value} for value in completion.logprobs],
                },
                "finish_reason": finish_reason,
                "stop_reason": None,
                "token_ids": list(completion.ids),
                "prompt_logprobs": None,
                "prompt_token_ids": prompt,
                "routed_experts": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0-09d4a051",
        "usage": {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + len(completion.ids),
            "completion_tokens": len(completion.ids),
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def streamed(name: str, completion: Completion) -> Iterator[str]:
    """A completion token by token."""
    pairs = zip(completion.ids, completion.logprobs, strict=True)
    for number, (token, logprob) in enumerate(pairs, 1):
        is_last = number == len(completion.ids)
        choice = {
            "index": 0,
            "text": "",
            "logprobs": {"token_logprobs": [logprob], "tokens": [""]},
            "finish_reason": completion.finish_reason if is_last else None,
            "stop_reason": None,
            "token_ids": [token],
        }
        chunk = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": name}
        yield f"data: {json.dumps({**chunk, 'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


def card(name: str, root: str, parent: str | None, max_model_len: int | None = None) -> Any:
    """An entry of `/v1/models`."""
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [],
    }


def error(status: int, kind: str, message: str, param: str | None = None) -> JSONResponse:
    """vLLM's error body."""
    body = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": body}, status)
