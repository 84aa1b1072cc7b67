"""Whatever Dynamo sends: unary and streamed replies agree; only genapi's errors escape."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genapi import GenAPIError, GenerateRequest, IncompleteError
from genapi.providers.base import WorkerFacts
from genapi.publication.evidence import Answer
from genapi.publication.plan import PausePlan
from genapi.types.ids import WorkerId
from genapi.types.response import GenerateResponse
from genapi.wire.flow import Flow
from genapi.wire.http import HTTPReply
from tests.support.dynamo_wire import (
    PROMPT,
    PROVIDER,
    URL,
    chunk,
    context,
    decode,
    request,
    sse,
    stream,
    usage,
)
from tests.support.transcripts import play

ids = st.integers(0, 2**31 - 1)
score = st.one_of(st.floats(width=32, min_value=-100, max_value=0), st.none(), st.just(-1e30))
instance = st.integers(0, 2**64 - 1)
FAMILIES = ("vllm", "sidecar", "collective", "sglang")


@st.composite
def replies(draw: st.DrawFn) -> tuple[GenerateRequest, list[dict[str, Any]], dict[str, Any]]:
    """A request, its reply in chunks, and the same in one piece."""
    tokens = draw(st.lists(ids, min_size=1, max_size=6))
    scores = [draw(score) for _ in tokens]
    workers = draw(st.tuples(instance, instance))
    cuts = sorted(draw(st.sets(st.integers(1, len(tokens)), max_size=3)) | {len(tokens)})
    finish = draw(st.sampled_from(["stop", "length", "cancelled", "another"]))
    last = {"prompt_token_ids": PROMPT, "engine_data": {"completion_token_ids": tokens, "k": 1}}
    chunks, start = [], 0
    for end in cuts:
        is_last = end == len(tokens)
        more: dict[str, Any] = last if is_last else {}
        chunks.append(
            chunk(
                tokens[start:end],
                finish if is_last else None,
                scores=scores[start:end],
                workers=workers,
                **more,
            )
        )
        start = end
    counts = usage(len(PROMPT), len(tokens), draw(st.integers(0, 3)))
    whole = chunk(tokens, finish, scores=scores, workers=workers, **last)
    whole["usage"] = counts["usage"]
    return request(max_tokens=6), [*chunks, counts], whole


def alike(one: GenerateResponse, other: GenerateResponse) -> bool:
    """Whether they are equal but for the text, which is cut where the chunks are."""
    texts = [{"text": None}, {"text": None}]
    outs = [
        tuple(o.model_copy(update=text) for o in reply.outputs)
        for reply, text in zip((one, other), texts, strict=True)
    ]
    return one.model_copy(update={"outputs": outs[0]}) == other.model_copy(
        update={"outputs": outs[1]}
    )


@given(replies(), st.integers(1, 40))
def test_a_stream_in_any_pieces_is_the_reply_in_one(
    drawn: tuple[GenerateRequest, list[dict[str, Any]], dict[str, Any]], step: int
) -> None:
    asked, chunks, whole = drawn
    one = decode(whole, asked)
    assert alike(stream(sse(*chunks), asked, step=step), one)
    assert "migrated" not in one.output.extra
    assert len(one.output.logprobs) == len(one.output.token_ids)  # type: ignore[arg-type]


@given(instance, instance)
def test_no_bit_of_a_workers_id_is_lost(prefill: int, decoding: int) -> None:
    reply = decode(chunk([1], "stop", workers=(prefill, decoding)), request())
    assert reply.worker == WorkerId(provider="dynamo", instance=str(decoding))
    if prefill == decoding:
        assert reply.prefill_worker is None
    else:
        assert reply.prefill_worker == WorkerId(provider="dynamo", instance=str(prefill))


@given(replies(), st.data())
def test_a_stream_cut_anywhere_is_incomplete_or_the_whole_reply(
    drawn: tuple[GenerateRequest, list[dict[str, Any]], dict[str, Any]], data: st.DataObject
) -> None:
    asked, chunks, whole = drawn
    content = sse(*chunks)
    cut = data.draw(st.integers(0, len(content)))
    decoder = PROVIDER.stream_decoder(context(asked))
    decoder.feed(content[:cut])
    try:
        reply = decoder.finish(framed=False)
    except IncompleteError as error:
        got = error.partial.outputs[0].token_ids if error.partial.outputs else []
        made = whole["nvext"]["completion_token_ids"]
        assert list(got) == made[: len(got)]
    else:
        assert reply.output.token_ids == whole["nvext"]["completion_token_ids"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
shaped = st.fixed_dictionaries(
    {},
    optional={
        "choices": json_values,
        "nvext": st.dictionaries(
            st.sampled_from(
                ["worker_id", "completion_token_ids", "prompt_token_ids", "engine_data"]
            ),
            json_values,
        ),
        "usage": json_values,
        "error": json_values,
        "message": json_values,
    },
)


@given(st.one_of(json_values, shaped), st.sampled_from([200, 400, 404, 499, 500, 503, 529]))
def test_only_errors_of_genapi_come_out_of_whatever_is_answered(body: Any, status: int) -> None:
    content = json.dumps(body).encode()
    reply = HTTPReply(status, content, {}, URL)
    with contextlib.suppress(GenAPIError):
        PROVIDER.decode(reply, context(request(prompt_logprobs=0)))
    decoder = PROVIDER.stream_decoder(context(request()))
    with contextlib.suppress(GenAPIError):
        decoder.feed(b"data: " + content + b"\n\ndata: [DONE]\n\n")
        decoder.finish(framed=True)


@given(st.binary(max_size=60))
def test_only_errors_of_genapi_come_out_of_any_bytes(content: bytes) -> None:
    with contextlib.suppress(GenAPIError):
        decode(content, request())
    with contextlib.suppress(GenAPIError):
        stream(b"data: " + content + b"\n\n", request())


PLAN = PausePlan("keep", "stale", "salt")
FLOWS: tuple[Callable[[Any], Flow[Answer]], ...] = (
    lambda admin: admin.join({"world_size": 2}, rank_offset=1, backend="gloo"),
    lambda admin: admin.pause(PLAN),
    lambda admin: admin.confirm(),
    lambda admin: admin.heal(),
    lambda admin: admin.begin(),
    lambda admin: admin.update({"names": [], "dtype_names": [], "shapes": []}, attachment=None),
    lambda admin: admin.finish("genapi:r:1:1"),
    lambda admin: admin.label("genapi:r:1:1"),
    lambda admin: admin.read(),
    lambda admin: admin.resume(PLAN),
    lambda admin: admin.close(),
    lambda admin: admin.leave(),
)


@pytest.mark.parametrize("family", FAMILIES)
@given(body=json_values, status=st.sampled_from([200, 400, 404, 500, 502, 503]))
def test_whatever_a_worker_answers_is_an_answer_or_a_broken_reply(
    family: str, body: Any, status: int
) -> None:
    details = {"family": family, "server": "http://e:1", "destroy_weights_update_group": "x"}
    admin = PROVIDER.administer(WorkerFacts(instance="1", details=details))
    reply = HTTPReply(status, json.dumps(body).encode(), {}, "http://w:1")
    for flow in FLOWS:
        with contextlib.suppress(GenAPIError):
            answer, _ = play(flow(admin), lambda _call: reply)
            assert isinstance(answer, Answer)


@given(
    st.one_of(json_values, st.fixed_dictionaries({"workers": st.lists(json_values, max_size=3)}))
)
def test_whatever_a_list_holds_is_workers_or_an_error(body: Any) -> None:
    assert PROVIDER.directory is not None
    reply = HTTPReply(200, json.dumps(body).encode(), {}, "http://f:1")
    with contextlib.suppress(GenAPIError):
        listing, _ = play(PROVIDER.directory.read("http://f:2", model="m"), lambda _call: reply)
        assert len({w.url for w in listing.workers}) == len(listing.workers)


def test_numbers_that_are_none_are_nan_and_nothing_else_is() -> None:
    reply = decode(chunk([1, 2, 3], "stop", scores=[None, -1e30, -9999.0]), request())
    assert reply.output.logprobs is not None
    assert np.isnan(reply.output.logprobs).tolist() == [True, True, False]
