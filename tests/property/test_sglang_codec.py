"""Whatever SGLang sends: unary and streamed replies agree; only genapi's errors escape."""

import contextlib
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from genapi import GenAPIError, GenerateRequest, IncompleteError
from genapi.providers.sglang.admin import SGLangAdmin
from genapi.publication.evidence import Op
from genapi.publication.plan import PausePlan
from genapi.types.response import GenerateResponse
from genapi.wire.flow import Flow
from genapi.wire.http import HTTPReply
from tests.support.sglang_wire import PROMPT, PROVIDER, URL, decode, request
from tests.support.transcripts import play
from tests.support.wire import context, sse

ids = st.integers(0, 2**31 - 1)
score = st.one_of(st.floats(width=32, min_value=-100, max_value=0), st.none())
label = st.sampled_from(["genapi:r:1:1", "genapi:r:2:1", "genapi:r:2:2", "default"])
finish = st.sampled_from(
    [
        {"type": "stop", "matched": 7},
        {"type": "stop", "matched": "END"},
        {"type": "length", "length": 6},
        {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
        {"type": "another"},
    ]
)
TOKEN_LISTS = ("output_token_logprobs", "output_top_logprobs")


@st.composite
def replies(draw: st.DrawFn) -> tuple[GenerateRequest, dict[str, Any]]:
    # Few ids, so that tokens repeat: what is new must not be told by looks.
    few = st.sampled_from([5, 7, draw(ids)])
    tokens = draw(st.lists(few, max_size=6))
    top = draw(st.integers(0, 2))
    entries = [[draw(score), token, None] for token in tokens]
    best = [
        draw(st.none() | st.lists(st.tuples(score, ids, st.none()).map(list), max_size=top))
        for _ in tokens
    ]
    cuts = draw(st.sets(st.integers(1, len(tokens) - 1), max_size=3)) if len(tokens) > 1 else set()
    edges = [0, *sorted(cuts), len(tokens)]
    spans = [{"version": draw(label), "start": a, "end": b} for a, b in pairwise(edges)]
    meta = {
        "id": "w",
        "finish_reason": draw(finish),
        "prompt_tokens": 4,
        "completion_tokens": len(tokens),
        "cached_tokens": 3,
        "weight_version": "default",
        "output_token_logprobs": entries,
        "output_top_logprobs": best,
        "weight_versions": draw(st.sampled_from([None, spans])),
    }
    body = {
        "text": "x" * len(tokens),
        "output_ids": tokens,
        "meta_info": meta,
        "prompt_token_ids": PROMPT,
    }
    return request(logprobs=draw(st.sampled_from([None, top])), max_tokens=6), body


@st.composite
def streams(draw: st.DrawFn, reply: dict[str, Any]) -> list[dict[str, Any]]:
    """The same reply as frames: each with all tokens so far, or each with the new ones."""
    tokens, meta = reply["output_ids"], reply["meta_info"]
    count, grows = len(tokens), draw(st.booleans())
    edges = [0, *sorted(draw(st.lists(st.integers(0, count), max_size=4))), count]
    frames = []
    for before, end in pairwise(edges):
        start = 0 if grows else before
        piece = {
            **meta,
            **{name: meta[name][start:end] for name in TOKEN_LISTS},
            "finish_reason": None,
            "completion_tokens": end,
        }
        del piece["weight_versions"]
        frames.append(
            {
                **reply,
                "text": reply["text"][start:end],
                "output_ids": tokens[start:end],
                "meta_info": piece,
            }
        )
    last = frames[-1]["meta_info"]
    last |= {name: meta[name] for name in ("finish_reason", "weight_versions")}
    return frames


def cut(data: st.DataObject, content: bytes) -> list[bytes]:
    edges = [0, *sorted(data.draw(st.sets(st.integers(0, len(content)), max_size=8))), len(content)]
    return [content[a:b] for a, b in pairwise(edges)]


@given(st.data())
def test_a_streamed_reply_equals_the_unary_one_however_it_is_cut(data: st.DataObject) -> None:
    asked, reply = data.draw(replies())
    once = decode(reply, asked, run="r")
    decoder = PROVIDER.stream_decoder(context(asked, run="r"))
    content = sse(*data.draw(streams(reply)))
    chunks = [c for piece in cut(data, content) for c in decoder.feed(piece)]
    assert decoder.finish(framed=True) == once
    assert [i for c in chunks for i in c.token_ids] == once.output.token_ids
    if once.output.logprobs is not None and chunks:
        joined = np.concatenate([c.logprobs for c in chunks if c.logprobs is not None])
        assert np.array_equal(joined, once.output.logprobs, equal_nan=True)


@given(st.data())
def test_a_stream_that_breaks_off_anywhere_keeps_what_had_arrived(data: st.DataObject) -> None:
    asked, reply = data.draw(replies())
    content = sse(*data.draw(streams(reply)))
    decoder = PROVIDER.stream_decoder(context(asked, run="r"))
    end = data.draw(st.integers(0, len(content) - len(b"data: [DONE]\n\n") - 1))
    chunks = decoder.feed(content[:end])
    arrived = [i for c in chunks for i in c.token_ids]
    assert arrived == reply["output_ids"][: len(arrived)]
    try:
        whole = decoder.finish(framed=False)
    except IncompleteError as error:
        outputs = error.partial.outputs
        assert [i for o in outputs for i in o.token_ids] == arrived
    else:
        raise AssertionError(whole)


@given(replies())
def test_a_decoded_reply_equals_one_that_was_validated(
    case: tuple[GenerateRequest, dict[str, Any]],
) -> None:
    asked, reply = case
    built = decode(reply, asked)
    assert GenerateResponse.model_validate(built.model_dump()) == built
    assert GenerateResponse.model_validate_json(built.model_dump_json()) == built


@given(replies())
def test_scores_are_kept_bit_for_bit_and_never_invented(
    case: tuple[GenerateRequest, dict[str, Any]],
) -> None:
    asked, reply = case
    out = decode(reply, asked).output
    assert out.token_ids == reply["output_ids"]
    if out.logprobs is None:
        return
    for value, entry in zip(out.logprobs, reply["meta_info"]["output_token_logprobs"], strict=True):
        assert np.isnan(value) if entry[0] is None else float(value) == entry[0]


NAMES = ["output_ids", "meta_info", "completion_tokens", "finish_reason", "type", "error", "x"]
NAMES += ["output_token_logprobs", "weight_versions", "success", "message", "ranks", "checksums"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)
bodies = st.one_of(json_values.map(lambda v: json.dumps(v).encode()), st.binary(max_size=40))


@given(bodies)
def test_no_body_raises_anything_but_genapis_errors(content: bytes) -> None:
    asked = request(prompt_logprobs=0, logprobs=1)
    with contextlib.suppress(GenAPIError):
        decode(content, asked)
    with contextlib.suppress(GenAPIError):
        decoder = PROVIDER.stream_decoder(context(asked))
        decoder.feed(sse(content.replace(b"\n", b" ").replace(b"\r", b" ")))
        decoder.finish(framed=True)


@st.composite
def garbled(draw: st.DrawFn) -> bytes:
    """A good reply of which one byte is another."""
    _, reply = draw(replies())
    content = bytearray(json.dumps(reply).encode())
    content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content)


@given(garbled())
def test_a_garbled_reply_raises_nothing_but_genapis_errors(content: bytes) -> None:
    with contextlib.suppress(GenAPIError):
        decode(content, request(logprobs=2))


ADMIN = SGLangAdmin()
FLOWS: dict[Op, Callable[[], Flow[Any]]] = {
    Op.PAUSE: lambda: ADMIN.pause(PausePlan()),
    Op.CONFIRM: ADMIN.confirm,
    Op.HEAL: ADMIN.heal,
    Op.BEGIN: ADMIN.begin,
    Op.UPDATE: lambda: ADMIN.update(
        {"names": [], "dtype_names": [], "shapes": []}, attachment=None
    ),
    Op.FINISH: lambda: ADMIN.finish(None),
    Op.LABEL: lambda: ADMIN.label("x"),
    Op.READ: ADMIN.read,
    Op.RESUME: lambda: ADMIN.resume(PausePlan()),
    Op.CLOSE: ADMIN.close,
    Op.PROBE: ADMIN.checksum,
    Op.INSPECT: PROVIDER.inspect,
}


@given(
    st.sampled_from(sorted(FLOWS)),
    st.lists(
        st.tuples(st.sampled_from([200, 400, 401, 404, 405, 500, 502, 503]), bodies),
        min_size=1,
        max_size=3,
    ),
)
def test_no_answer_to_administration_raises_anything_but_genapis_errors(
    op: Op, answers: list[tuple[int, bytes]]
) -> None:
    flow = FLOWS[op]()
    asked = 0

    def answer(_call: object) -> HTTPReply:
        nonlocal asked
        asked += 1
        status, body = answers[asked % len(answers)]
        return HTTPReply(status, body, {}, f"{URL}/x")

    with contextlib.suppress(GenAPIError):
        play(flow, answer)


@given(st.lists(ids, min_size=1, max_size=50))
def test_the_prompt_arrives_id_by_id(prompt: list[int]) -> None:
    call = PROVIDER.encode(request(prompt=prompt), wire_id="w", model=None, salt=None, stream=False)
    assert json.loads(call.body or b"")["input_ids"] == prompt
