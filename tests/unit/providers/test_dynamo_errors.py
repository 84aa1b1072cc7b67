"""Error answers of a Dynamo frontend as typed errors."""

import pytest

from genapi import (
    ConfigError,
    GenAPIError,
    NotReadyError,
    OverloadedError,
    OverlongPromptError,
    ProviderError,
)
from genapi.types.ids import WorkerId
from genapi.wire.http import HTTPReply
from tests.support.dynamo_wire import PROVIDER, URL, context, recorded, request

ANSWERS = recorded("frontend_validation_errors")
PINNED = WorkerId(provider="dynamo", component="backend", instance="1234")


def raised(reply: HTTPReply, *, pinned: WorkerId | None = None) -> GenAPIError:
    with pytest.raises(GenAPIError) as caught:
        PROVIDER.raise_for_status(reply, context(request(), worker=pinned))
    return caught.value


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_every_recorded_refusal_says_what_the_frontend_said(number: int) -> None:
    error = raised(ANSWERS[number].reply)
    assert str(ANSWERS[number].reply.status) in str(error)


def test_an_unknown_model_is_a_mistake_of_the_configuration() -> None:
    error = raised(ANSWERS[0].reply)
    assert isinstance(error, ConfigError)
    assert "model=" in str(error)


def test_an_unknown_field_is_the_frontends_own_refusal() -> None:
    error = raised(ANSWERS[1].reply)
    assert type(error) is ProviderError
    assert "return_token_ids" in str(error)


def test_the_opaque_refusal_is_explained_by_whether_a_worker_was_named() -> None:
    (opaque,) = {c.reply.body for c in ANSWERS if b"Invalid request" in c.reply.body}
    reply = HTTPReply(400, opaque, {}, URL)
    plain, gone = raised(reply), raised(reply, pinned=PINNED)
    assert type(plain) is ProviderError
    assert "vocabulary" in str(plain)
    assert isinstance(gone, NotReadyError)
    assert gone.code == "no_worker"
    assert "1234" in str(gone)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (recorded("vllm_sleep_wake")[3].reply, NotReadyError),
        (HTTPReply(404, b"", {}, URL), NotReadyError),
        (HTTPReply(503, b'{"message":"x","type":"y","code":503}', {}, URL), NotReadyError),
        (HTTPReply(529, b'{"message":"busy"}', {"retry-after": "2"}, URL), OverloadedError),
        (recorded("vllm_pause_abort_masks_as_stop")[-1].reply, ProviderError),
        (HTTPReply(500, b"oops", {}, URL), ProviderError),
    ],
)
def test_statuses_are_told_apart(reply: HTTPReply, kind: type[GenAPIError]) -> None:
    assert isinstance(raised(reply), kind)


def test_a_workers_own_server_says_what_and_why() -> None:
    boom, missing, *_ = recorded("custom_worker_handler_errors")
    assert "Handler error: Python callback failed: RuntimeError: boom" in str(raised(boom.reply))
    assert "Route /engine/nope not found" in str(raised(missing.reply))


@pytest.mark.parametrize("pinned", [None, PINNED])
def test_a_prompt_that_leaves_no_room_is_overlong_also_where_a_worker_was_named(
    pinned: WorkerId | None,
) -> None:
    (call,) = recorded("frontend_context_length")
    error = raised(call.reply, pinned=pinned)
    assert isinstance(error, OverlongPromptError)
    assert "prompt and max_tokens take 4113 of 4096 tokens" in str(error)
