"""vLLM's error answers as typed errors."""

import json
from typing import Any

import pytest

from genapi import (
    AuthError,
    ConfigError,
    GenAPIError,
    NotReadyError,
    OverloadedError,
    OverlongPromptError,
    ProviderError,
)
from genapi.wire.http import HTTPReply
from tests.support.transcripts import exchange, exchanges
from tests.support.vllm_wire import PROVIDER, URL, request
from tests.support.wire import context


def raised(reply: HTTPReply, **how: Any) -> GenAPIError:
    with pytest.raises(GenAPIError) as caught:
        PROVIDER.raise_for_status(reply, context(request(**how)))
    return caught.value


def answer(status: int, error: object, **headers: str) -> HTTPReply:
    return HTTPReply(status, json.dumps({"error": error}).encode(), headers, URL)


@pytest.mark.parametrize(
    ("number", "name", "kind", "text"),
    [
        ("50", "no key: POST /inference/v1/generate", AuthError, "check the API key"),
        ("46", "unknown model generate", ConfigError, "`nope` does not exist. Valid aliases: tiny"),
        ("46", "prompt too long generate", OverlongPromptError, "length 16390"),
        ("46", "prompt too long completions", OverlongPromptError, "16390 input tokens"),
        ("46", "token id out of vocab generate", ProviderError, "Token id 100000"),
        ("46", "too many logprobs", ProviderError, "max allowed: 20"),
        ("46", "404 route", ConfigError, "--enable-scale-out"),
        ("51", "use after unload", ConfigError, "`policy-a` does not exist"),
    ],
)
def test_a_recorded_error_has_its_type_and_the_servers_words(
    number: str, name: str, kind: type[GenAPIError], text: str
) -> None:
    error = raised(exchange("vllm", number, name).reply)
    assert type(error) is kind
    assert text in str(error)
    assert "http://recorded/" in str(error)


def test_a_missing_adapter_is_the_servers_error_not_the_configurations() -> None:
    error = raised(exchange("vllm", "51", "use after unload").reply, lora="policy-a")
    assert type(error) is ProviderError
    assert error.status == 404


def test_a_dead_engine_has_a_code_of_its_own() -> None:
    for recorded in exchanges("vllm", "90"):
        if recorded.status == 500:
            error = raised(recorded.reply)
            assert isinstance(error, ProviderError)
            assert error.code == "engine_dead"


def test_scale_out_that_is_off_names_the_flag() -> None:
    off = {
        "message": "Scale-out endpoints are disabled.",
        "type": "PermissionDeniedError",
        "code": 403,
    }
    error = raised(answer(403, off))
    assert isinstance(error, ConfigError)
    assert "--enable-scale-out" in str(error)


def test_any_other_403_is_about_the_key() -> None:
    assert isinstance(raised(answer(403, "Forbidden")), AuthError)


@pytest.mark.parametrize(
    ("reply", "kind", "code", "wait"),
    [
        (answer(429, "slow down", **{"retry-after": "2"}), OverloadedError, None, 2.0),
        (
            answer(503, "The engine is currently busy and cannot accept"),
            OverloadedError,
            None,
            None,
        ),
        (
            answer(
                503,
                {"message": "Generation is paused. Please retry after it resumes."},
                **{"retry-after": "1"},
            ),
            NotReadyError,
            "paused",
            1.0,
        ),
        (HTTPReply(503, b"", {"retry-after-ms": "250"}, URL), NotReadyError, None, 0.25),
        (HTTPReply(502, b"<html>bad gateway</html>", {}, URL), NotReadyError, None, None),
    ],
)
def test_a_server_that_cannot_serve_now_says_for_how_long(
    reply: HTTPReply, kind: type[ProviderError], code: str | None, wait: float | None
) -> None:
    error = raised(reply)
    assert type(error) is kind
    assert isinstance(error, OverloadedError | NotReadyError)
    assert (error.code, error.retry_after_s) == (code, wait)


@pytest.mark.parametrize(
    "body",
    [b"", b"Internal Server Error", b"\xff\xfe", b"[1]", b"null", b'{"error":{"message":7}}'],
)
def test_an_error_body_of_any_shape_is_kept_and_shown(body: bytes) -> None:
    error = raised(HTTPReply(500, body, {}, URL))
    assert type(error) is ProviderError
    assert (error.status, error.body, error.url) == (500, body, URL)


def test_a_good_answer_raises_nothing() -> None:
    PROVIDER.raise_for_status(HTTPReply(200), context(request()))


def test_scores_that_are_no_numbers_have_a_code_of_their_own() -> None:
    error = raised(answer(400, {"message": "Out of range float values are not JSON compliant"}))
    assert isinstance(error, ProviderError)
    assert error.code == "not_finite"
    assert "weights are broken" in str(error)
