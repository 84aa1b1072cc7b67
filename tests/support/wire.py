"""Short ways to write what any engine's wire has in common: contexts, event streams, pieces."""

import json
from typing import Any

from genapi import GenerateRequest
from genapi.providers.base import DecodeContext, Provider
from genapi.types.response import GenerateResponse


def context(asked: GenerateRequest, **more: Any) -> DecodeContext:
    return DecodeContext(**{"request": asked, "request_id": "r", "wire_id": "w", **more})


def sse(*frames: Any, done: bool = True) -> bytes:
    texts = [f if isinstance(f, bytes) else json.dumps(f).encode() for f in frames]
    return b"".join(b"data: " + text + b"\n\n" for text in [*texts, *([b"[DONE]"] if done else [])])


def streamed(
    provider: Provider,
    content: bytes,
    asked: GenerateRequest,
    *,
    framed: bool = True,
    step: int | None = None,
    **more: Any,
) -> GenerateResponse:
    """Decode a streamed body that arrives in pieces of `step` bytes."""
    decoder = provider.stream_decoder(context(asked, **more))
    size = step or max(len(content), 1)
    for start in range(0, len(content), size):
        decoder.feed(content[start : start + size])
    return decoder.finish(framed=framed)
