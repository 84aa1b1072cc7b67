"""Short ways to write vLLM requests, replies and streams in tests."""

import json
from typing import Any

from genapi import GenerateRequest, SamplingParams
from genapi.providers.base import DecodeContext
from genapi.providers.vllm.provider import VLLM
from genapi.types.response import GenerateResponse
from genapi.wire.http import HTTPReply

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


class Remarks(list[str]):
    """Collects what decoding remarks upon."""


def context(asked: GenerateRequest, **more: Any) -> DecodeContext:
    return DecodeContext(**{"request": asked, "request_id": "r", "wire_id": "w", **more})


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


def sse(*frames: bytes | dict[str, Any], done: bool = True) -> bytes:
    texts = [f if isinstance(f, bytes) else json.dumps(f).encode() for f in frames]
    return b"".join(b"data: " + text + b"\n\n" for text in [*texts, *([b"[DONE]"] if done else [])])


def stream(
    content: bytes,
    asked: GenerateRequest,
    *,
    framed: bool = True,
    step: int | None = None,
    **more: Any,
) -> GenerateResponse:
    """Decode a streamed body that arrives in pieces of `step` bytes."""
    decoder = PROVIDER.stream_decoder(context(asked, **more))
    size = step or max(len(content), 1)
    for start in range(0, len(content), size):
        decoder.feed(content[start : start + size])
    return decoder.finish(framed=framed)
