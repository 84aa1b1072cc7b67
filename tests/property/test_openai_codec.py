"""Whatever OpenAI's routes send: unary and streamed replies agree; only genapi's errors escape."""

import contextlib
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from genapi import GenAPIError, GenerateRequest, SamplingParams
from genapi.providers.base import Provider
from genapi.providers.sglang import Options as SGLangOptions
from genapi.providers.sglang.provider import SGLang
from genapi.providers.vllm import Options as VLLMOptions
from genapi.providers.vllm.provider import VLLM
from genapi.types.response import GenerateResponse
from genapi.wire.http import HTTPReply
from tests.support.wire import context, sse

ids = st.integers(0, 2**31 - 1)
scores = st.one_of(st.floats(width=32, min_value=-100, max_value=0), st.none())
texts = st.text(max_size=4)


@dataclass(frozen=True)
class Piece:
    """What one frame brings of one output."""

    token_ids: list[int]
    scores: list[float | None]
    text: str
    thought: str
    arguments: str


pieces = st.integers(0, 3).flatmap(
    lambda count: st.builds(
        Piece,
        token_ids=st.lists(ids, min_size=count, max_size=count),
        scores=st.lists(scores, min_size=count, max_size=count),
        text=texts,
        thought=texts,
        arguments=texts,
    )
)
outputs = st.lists(st.lists(pieces, min_size=1, max_size=4), min_size=1, max_size=3)


def logprobs(piece: Piece, *, chat: bool) -> dict[str, Any]:
    if chat:
        return {"content": [{"token": "x", "logprob": score} for score in piece.scores]}
    return {"tokens": ["x"] * len(piece.scores), "token_logprobs": piece.scores}


def choice(index: int, piece: Piece, *, chat: bool, whole: bool, finish: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {"text": piece.text}
    if chat:
        function = {"name": "f", "arguments": piece.arguments}
        call = {"index": 0, "id": "k", "type": "function", "function": function}
        message = {"content": piece.text, "reasoning": piece.thought, "tool_calls": [call]}
        shown = {"message" if whole else "delta": message}
    return {
        "index": index,
        **shown,
        "logprobs": logprobs(piece, chat=chat),
        "finish_reason": finish,
        "token_ids": piece.token_ids,
    }


def joined(parts: list[Piece]) -> Piece:
    return Piece(
        [i for part in parts for i in part.token_ids],
        [s for part in parts for s in part.scores],
        *("".join(getattr(p, name) for p in parts) for name in ("text", "thought", "arguments")),
    )


def comparable(reply: GenerateResponse) -> list[Any]:
    return [
        (
            o.token_ids.tolist(),
            None if o.logprobs is None else np.nan_to_num(o.logprobs, nan=9).tolist(),
            o.text,
            o.reasoning,
            o.tool_calls,
            o.finish_raw,
        )
        for o in reply.outputs
    ]


def asked(n: int, *, chat: bool, options: Any) -> GenerateRequest:
    prompt: dict[str, Any] = {"messages": [{"role": "user"}]} if chat else {"prompt": "x"}
    sampling = SamplingParams(max_tokens=16, n=n)
    return GenerateRequest(sampling=sampling, options=options, **prompt)


@given(st.data(), outputs, st.sampled_from(["chat", "completions", "sglang"]))
def test_a_stream_in_any_order_and_cut_anywhere_is_the_reply_of_one_piece(
    data: st.DataObject, found: list[list[Piece]], form: str
) -> None:
    chat, provider = form == "chat", SGLang() if form == "sglang" else VLLM()
    found = found[:1] if form == "sglang" else found
    options = SGLangOptions(route="openai") if form == "sglang" else VLLMOptions(route="openai")
    request = asked(len(found), chat=chat, options=options)
    body = {
        "choices": [
            choice(index, joined(parts), chat=chat, whole=True, finish="stop")
            for index, parts in enumerate(found)
        ]
    }
    left = {
        index: [choice(index, part, chat=chat, whole=False, finish=None) for part in parts]
        for index, parts in enumerate(found)
    }
    frames = []
    while any(left.values()):
        index = data.draw(st.sampled_from([i for i, queue in left.items() if queue]))
        one = left[index].pop(0)
        one["finish_reason"] = None if left[index] else "stop"
        frames.append({"choices": [one]})
    content = sse(*frames)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(content) - 1), max_size=4)))
    assert _result(provider, request, content, cuts) == _result(
        provider, request, json.dumps(body).encode(), None
    )


def _result(
    provider: Provider, request: GenerateRequest, content: bytes, cuts: list[int] | None
) -> Any:
    try:
        if cuts is None:
            return comparable(provider.decode(HTTPReply(200, content), context(request)))
        decoder = provider.stream_decoder(context(request))
        handed: dict[int, list[int]] = {}
        for start, end in pairwise([0, *cuts, len(content)]):
            for chunk in decoder.feed(content[start:end]):
                handed.setdefault(chunk.index, []).extend(chunk.token_ids)
        reply = decoder.finish(framed=True)
    except GenAPIError as error:
        return type(error)
    assert all(handed.get(o.index, []) == o.token_ids.tolist() for o in reply.outputs)
    return comparable(reply)


NAMES = (
    *("choices", "index", "message", "delta", "logprobs", "content", "token_ids"),
    *("finish_reason", "usage", "error", "tool_calls", "meta_info", "metadata"),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(NAMES),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.one_of(st.binary(max_size=40), json_values.map(lambda v: json.dumps(v).encode())))
def test_only_genapis_errors_escape(content: bytes) -> None:
    for provider, options in (
        (VLLM(), VLLMOptions(route="openai")),
        (SGLang(), SGLangOptions(route="openai")),
    ):
        for chat in (False, True):
            request = asked(1, chat=chat, options=options)
            with contextlib.suppress(GenAPIError):
                provider.decode(HTTPReply(200, content), context(request))
            decoder = provider.stream_decoder(context(request))
            with contextlib.suppress(GenAPIError):
                decoder.feed(sse(content))
                decoder.finish(framed=True)
