"""Short ways to write vLLM requests, replies and streams in tests."""

import json
from functools import partial
from typing import Any

from genapi import GenerateRequest, SamplingParams
from genapi.providers.vllm.provider import VLLM
from genapi.types.response import GenerateResponse
from genapi.wire.http import HTTPReply
from tests.support.wire import context, streamed

PROMPT = [300, 301, 302]
URL = "http://w1:8000/inference/v1/generate"
PROVIDER = VLLM()


def request(
    *, prompt: list[int] | None = None, lora: str | None = None, **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(
        prompt_token_ids=PROMPT if prompt is None else prompt,
        lora=lora,
        sampling=SamplingParams(**{"max_tokens": 16, **sampling}),
    )


def scores(*values: float | None, ids: list[int] | None = None) -> dict[str, Any]:
    """A `logprobs` field; an id is left out where none is given."""
    named = [{"token_id": i} for i in ids] if ids else [{} for _ in values]
    return {"content": [{**name, "logprob": v} for name, v in zip(named, values, strict=True)]}


def choice(ids: list[int], finish: str | None = None, **more: Any) -> dict[str, Any]:
    """One choice whose logprobs are -1 for each token unless given."""
    base = {"index": 0, "token_ids": ids, "finish_reason": finish}
    return {**base, "logprobs": scores(*[-1.0] * len(ids), ids=ids), **more}


def body(*choices: dict[str, Any], **more: Any) -> bytes:
    """A unary reply, or one frame, with the prompt echoed."""
    return json.dumps({"prompt_token_ids": PROMPT, "choices": choices, **more}).encode()


def decode(content: bytes, asked: GenerateRequest, **more: Any) -> GenerateResponse:
    return PROVIDER.decode(HTTPReply(200, content, {}, URL), context(asked, **more))


stream = partial(streamed, PROVIDER)
