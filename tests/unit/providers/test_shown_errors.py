"""What errors and receipts show of an answer, whichever shape it has."""

import json

import pytest

from genapi import GenAPIError
from genapi.providers import registry
from genapi.providers.dynamo import verdicts as dynamo
from genapi.providers.sglang import verdicts as sglang
from genapi.providers.vllm import verdicts as vllm
from genapi.publication.evidence import Op
from genapi.wire.http import HTTPReply
from tests.support.sglang_wire import URL, request
from tests.support.wire import context

ANSWER_OF = {"vllm": vllm.answer_of, "sglang": sglang.answer_of, "dynamo": dynamo.answer_of}
SHAPES = ["text", "string", "error.message", "error", "message", "object", "detail", "details"]
LONG = 300_000


def body_of(shape: str, text: str) -> bytes:
    if shape == "text":
        return text.encode()
    body = {
        "string": text,
        "error.message": {"error": {"message": text}},
        "error": {"error": text},
        "message": {"message": text},
        "object": {"object": "error", "message": text},
        "detail": {"detail": text},
        "details": {"detail": [{"type": "x", "input": text}]},
    }
    return json.dumps(body[shape]).encode()


def shown(provider: str, body: bytes) -> tuple[str, str]:
    """What an error says of an answer, and what a receipt does."""
    reply = HTTPReply(500, body, {}, URL)
    with pytest.raises(GenAPIError) as caught:
        registry.provider(provider).raise_for_status(reply, context(request()))
    return str(caught.value), ANSWER_OF[provider](Op.UPDATE, reply).detail


@pytest.mark.parametrize("provider", [*ANSWER_OF])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_error_and_no_receipt_shows_a_password(provider: str, shape: str) -> None:
    for text in shown(provider, body_of(shape, "cannot reach http://user:hunter2@h:1")):
        assert "hunter2" not in text
        assert "@h:1" in text


@pytest.mark.parametrize("provider", [*ANSWER_OF])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("part", ["A", "a:"])
def test_of_a_long_answer_errors_and_receipts_show_the_beginning(
    provider: str, shape: str, part: str
) -> None:
    for text in shown(provider, body_of(shape, part * LONG + " a@b")):
        assert len(text) < 2500


@pytest.mark.parametrize("part", ["'loc': (", "'loc': (), 'msg': \"", "'loc': (), 'msg': '"])
def test_a_long_answer_of_sglang_about_fields_is_read_in_bounded_time(part: str) -> None:
    body = body_of("detail", f"1 validation error: {part * LONG}")
    for said in shown("sglang", body):
        assert len(said) < 2500
