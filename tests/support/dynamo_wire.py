"""Short ways to write Dynamo requests, replies and streams in tests, and its recorded exchanges."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from genapi import GenerateRequest, SamplingParams
from genapi.providers.base import DecodeContext
from genapi.providers.dynamo.provider import Dynamo
from genapi.types.response import GenerateResponse
from genapi.wire.http import HTTPReply

PROMPT = [4, 5, 6]
URL = "http://frontend:8000"
PROVIDER = Dynamo()
ROOT = Path(__file__).parents[1] / "transcripts" / "dynamo"
BIG = 17448862771584178453
"""An instance that no signed number of 64 bits holds, and no float."""


@dataclass(frozen=True)
class Recorded:
    """One recorded call and its answer."""

    method: str
    path: str
    json: Any
    reply: HTTPReply


def recorded(name: str) -> list[Recorded]:
    """The calls of the recorded exchange of that name, in order."""
    found = []
    for entry in json.loads((ROOT / f"{name}.json").read_text())["calls"]:
        request, response = entry["request"], entry["response"]
        body = response["body"]
        if isinstance(body, dict) and "sse_lines" in body:
            content = "".join(f"{line}\n\n" for line in body["sse_lines"]).encode()
        else:
            content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        url = urlsplit(request["url"])
        found.append(
            Recorded(
                request["method"],
                url.path,
                request["body"],
                HTTPReply(response["status"], content, {}, request["url"]),
            )
        )
    return found


def request(*, prompt: list[int] | None = None, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        prompt_token_ids=PROMPT if prompt is None else prompt,
        sampling=SamplingParams(**{"max_tokens": 16, **sampling}),
    )


def asked_for(call: Recorded, **more: Any) -> GenerateRequest:
    """The request that a recorded generation answers, as far as decoding looks at it."""
    sent = call.json
    wanted = {
        "max_tokens": sent["max_tokens"],
        "logprobs": 0 if "logprobs" in sent else None,
        "prompt_logprobs": sent.get("prompt_logprobs"),
    }
    return request(prompt=sent["prompt"], **{**wanted, **more})


def context(asked: GenerateRequest, **more: Any) -> DecodeContext:
    return DecodeContext(**{"request": asked, "request_id": "r", "wire_id": "w", **more})


def chunk(
    ids: list[int],
    finish: str | None = None,
    *,
    scores: list[float | None] | None = None,
    workers: tuple[int, int] = (BIG, BIG),
    **nvext: Any,
) -> dict[str, Any]:
    """A reply, or one chunk of a stream."""
    choice: dict[str, Any] = {"text": "".join(f" {i}" for i in ids), "index": 0}
    if scores is not None:
        choice["logprobs"] = {"tokens": [], "token_logprobs": scores, "text_offset": []}
    if finish is not None:
        choice["finish_reason"] = finish
    prefill, decode = workers
    return {
        "id": "cmpl-1",
        "choices": [choice],
        "model": "tiny",
        "nvext": {
            "worker_id": {"prefill_worker_id": prefill, "decode_worker_id": decode},
            "completion_token_ids": ids,
            **nvext,
        },
    }


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """The last chunk of a stream."""
    return {
        "id": "cmpl-1",
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"audio_tokens": None, "cached_tokens": cached},
        },
    }


def decode(body: Any, asked: GenerateRequest, **more: Any) -> GenerateResponse:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = HTTPReply(200, content, {}, f"{URL}/v1/completions")
    return PROVIDER.decode(reply, context(asked, **more))


def sse(*frames: Any, done: bool = True) -> bytes:
    texts = [json.dumps(frame).encode() for frame in frames]
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
