"""Whatever vLLM sends: unary and streamed replies agree; only genapi's errors escape."""

import contextlib
import json
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from genapi import GenAPIError, GenerateRequest
from genapi.types.response import GenerateResponse
from tests.support.vllm_wire import PROMPT, PROVIDER, decode, request
from tests.support.wire import context, sse

ids = st.integers(0, 2**31 - 1)
score = st.one_of(st.floats(width=32, min_value=-100, max_value=0), st.none(), st.just(-9999.0))
label = st.sampled_from(["genapi:r:1:1", "genapi:r:2:1", "genapi:r:2:2", "default"])


@st.composite
def choices(draw: st.DrawFn, index: int, top: int) -> dict[str, Any]:
    tokens = draw(st.lists(ids, max_size=6))
    entries = []
    for token in tokens:
        entry: dict[str, Any] = {"token_id": token, "logprob": draw(score), "rank": 1}
        candidates = draw(st.lists(st.tuples(ids, score), min_size=0, max_size=top))
        entry["top_logprobs"] = [{"token_id": i, "logprob": s, "rank": 1} for i, s in candidates]
        entries.append(entry)
    cuts = (
        sorted(draw(st.sets(st.integers(1, len(tokens) - 1), max_size=3)))
        if len(tokens) > 1
        else []
    )
    edges = [0, *cuts, len(tokens)]
    spans = [{"version": draw(label), "start": a, "end": b} for a, b in pairwise(edges)]
    return {
        "index": index,
        "token_ids": tokens,
        "logprobs": {"content": entries},
        "finish_reason": draw(st.sampled_from(["stop", "length", "abort", "repetition"])),
        "stop_reason": draw(st.sampled_from([None, "END", 7])),
        "weight_versions": draw(st.sampled_from([None, spans])),
        "routed_experts": None,
        "sampling_mask": None,
    }


@st.composite
def replies(draw: st.DrawFn) -> tuple[GenerateRequest, dict[str, Any]]:
    n, top = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    body = {
        "prompt_token_ids": PROMPT,
        "choices": [draw(choices(i, top)) for i in range(n)],
        "usage": {"prompt_tokens": 3, "completion_tokens": 0, "prompt_tokens_details": None},
    }
    return request(n=n, logprobs=draw(st.sampled_from([None, top])), max_tokens=6), body


@st.composite
def streams(draw: st.DrawFn, reply: dict[str, Any]) -> list[bytes]:
    """The same reply as frames in some order, as bytes cut anywhere."""
    queues = []
    for choice in reply["choices"]:
        count = len(choice["token_ids"])
        cuts = sorted(draw(st.sets(st.integers(0, count), max_size=3)))
        edges = [0, *cuts, count]
        pieces: list[dict[str, Any]] = []
        for start, end in pairwise(edges):
            last = end == count and start == edges[-2]
            piece = {**choice, "token_ids": choice["token_ids"][start:end]}
            piece["logprobs"] = {"content": choice["logprobs"]["content"][start:end]}
            if not last or len(pieces) < len(edges) - 2:
                piece |= {"finish_reason": None, "stop_reason": None, "weight_versions": None}
            pieces.append(piece)
        queues.append(pieces)
    frames: list[dict[str, Any]] = [{"prompt_token_ids": PROMPT, "choices": []}]
    while any(queues):
        queue = draw(st.sampled_from([q for q in queues if q]))
        frames.append({"choices": [queue.pop(0)], "usage": None})
    frames.append({"choices": [], "usage": reply["usage"]})
    content = sse(*frames)
    cuts = sorted(draw(st.sets(st.integers(0, len(content)), max_size=8)))
    edges = [0, *cuts, len(content)]
    return [content[a:b] for a, b in pairwise(edges)]


@given(st.data())
def test_a_streamed_reply_equals_the_unary_one_however_it_is_cut(data: st.DataObject) -> None:
    asked, reply = data.draw(replies())
    once = decode(json.dumps(reply).encode(), asked, run="r")
    decoder = PROVIDER.stream_decoder(context(asked, run="r"))
    chunks = [c for piece in data.draw(streams(reply)) for c in decoder.feed(piece)]
    assert decoder.finish(framed=True) == once
    for output in once.outputs:
        own = [c for c in chunks if c.index == output.index]
        assert [i for c in own for i in c.token_ids] == output.token_ids
        if output.logprobs is not None and own:
            joined = np.concatenate([c.logprobs for c in own if c.logprobs is not None])
            assert np.array_equal(joined, output.logprobs, equal_nan=True)


@given(replies())
def test_a_decoded_reply_equals_one_that_was_validated(
    case: tuple[GenerateRequest, dict[str, Any]],
) -> None:
    asked, reply = case
    built = decode(json.dumps(reply).encode(), asked)
    assert GenerateResponse.model_validate(built.model_dump()) == built
    assert GenerateResponse.model_validate_json(built.model_dump_json()) == built


@given(replies())
def test_scores_are_kept_bit_for_bit_and_never_invented(
    case: tuple[GenerateRequest, dict[str, Any]],
) -> None:
    asked, reply = case
    built = decode(json.dumps(reply).encode(), asked)
    for output, sent in zip(built.outputs, reply["choices"], strict=True):
        assert output.token_ids == sent["token_ids"]
        if output.logprobs is None:
            continue
        assert len(output.logprobs) == len(output.token_ids)
        for value, entry in zip(output.logprobs, sent["logprobs"]["content"], strict=True):
            usable = entry["logprob"] not in (None, -9999.0)
            assert (float(value) == entry["logprob"]) if usable else np.isnan(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "index", "token_ids", "logprobs", "content", "error", "usage", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.one_of(json_values.map(lambda v: json.dumps(v).encode()), st.binary(max_size=40)))
@example(b'{"unknown": Infinity}')
def test_no_body_raises_anything_but_genapis_errors(content: bytes) -> None:
    with contextlib.suppress(GenAPIError):
        decode(content, request())
    with contextlib.suppress(GenAPIError):
        _streamed(content)


def _streamed(content: bytes) -> GenerateResponse:
    decoder = PROVIDER.stream_decoder(context(request()))
    decoder.feed(sse(content.replace(b"\n", b" ").replace(b"\r", b" ")))
    return decoder.finish(framed=True)


@given(st.lists(ids, min_size=1, max_size=50))
def test_the_prompt_arrives_id_by_id(prompt: list[int]) -> None:
    call = PROVIDER.encode(request(prompt=prompt), wire_id="w", model=None, salt=None, stream=False)
    assert json.loads(call.body or b"")["token_ids"] == prompt
