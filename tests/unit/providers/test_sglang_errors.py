"""SGLang's error answers, in each of its shapes, as genapi's errors."""

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
from tests.support.sglang_wire import PROVIDER, URL, recorded, request
from tests.support.wire import context


def raised(reply: HTTPReply) -> GenAPIError:
    with pytest.raises(GenAPIError) as caught:
        PROVIDER.decode(reply, context(request()))
    with pytest.raises(type(caught.value)):
        PROVIDER.raise_for_status(reply, context(request()))
    return caught.value


def answer(status: int, body: Any, path: str = "/generate", **headers: str) -> HTTPReply:
    return HTTPReply(status, json.dumps(body).encode(), headers, URL + path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("error_negative_temperature", "temperature must be a non-negative finite number"),
        ("error_unknown_sampling_param", "unknown field `bogus`"),
        ("openai_error_missing_messages", "messages"),
        ("weights_10_end_without_session", "no weight-update session is open"),
        ("error_init_weights_update_group_dp2", "Internal Server Error"),
    ],
)
def test_the_text_of_every_shape_is_shown(name: str, text: str) -> None:
    error = raised(recorded(name))
    assert isinstance(error, ProviderError)
    assert text in str(error)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("error_bad_type", "body.input_ids: Value error, must be list or null; got str"),
        ("error_pause_bad_mode", "should be 'abort', 'retract' or 'in_place'"),
        ("error_init_missing_fields", "body.master_port: Field required"),
        ("continue_no_body", "body: Field required"),
    ],
)
def test_a_validation_error_says_what_is_wrong_and_nothing_of_the_request_or_the_servers_files(
    name: str, shown: str
) -> None:
    text = str(raised(recorded(name)))
    assert shown in text
    assert "site-packages" not in text
    assert "'input'" not in text


@pytest.mark.parametrize(
    ("name", "hint"),
    [("error_too_long", ""), ("error_max_new_tokens_too_big", "does not shorten max_tokens")],
)
def test_what_does_not_fit_the_context_is_overlong(name: str, hint: str) -> None:
    error = raised(recorded(name))
    assert isinstance(error, OverlongPromptError)
    assert (error.status, hint in str(error)) == (400, True)


@pytest.mark.case("AUTH-01")
@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/generate", "check api_key"),
        ("/server_info", "check api_key"),
        ("/prefix/model_info", "check api_key"),
        ("/abort_request", "check admin_api_key"),
        ("/pause_generation", "check admin_api_key"),
    ],
)
def test_a_refused_key_says_which_of_the_two_the_route_takes(path: str, key: str) -> None:
    error = raised(answer(401, {"error": "Unauthorized"}, path))
    assert isinstance(error, AuthError)
    assert key in str(error)


@pytest.mark.case("AUTH-01")
def test_recorded_refusals_of_both_kinds_of_routes_are_told_apart() -> None:
    assert "check api_key" in str(raised(recorded("auth_generate_no_key")))
    assert "check admin_api_key" in str(raised(recorded("auth_admin_route_user_key")))


@pytest.mark.parametrize(
    ("reply", "kind", "wait"),
    [
        (answer(503, {"detail": "The request queue is full."}), OverloadedError, None),
        (answer(429, {"error": "slow down"}, **{"retry-after": "2"}), OverloadedError, 2.0),
        (HTTPReply(503, b"", {}, f"{URL}/generate"), NotReadyError, None),
        (HTTPReply(502, b"<html>", {}, f"{URL}/generate"), NotReadyError, None),
    ],
)
def test_a_server_that_cannot_serve_now_is_told_from_one_that_refuses(
    reply: HTTPReply, kind: type[ProviderError], wait: float | None
) -> None:
    error = raised(reply)
    assert type(error) is kind
    assert isinstance(error, OverloadedError | NotReadyError)
    assert error.retry_after_s == wait


@pytest.mark.parametrize("name", ["error_404", "error_405"])
def test_a_route_that_is_not_there_is_a_matter_of_set_up(name: str) -> None:
    error = raised(recorded(name))
    assert isinstance(error, ConfigError)
    assert "is it an SGLang server?" in str(error)


def test_an_adapter_that_is_not_loaded_stays_the_servers_own_error() -> None:
    error = raised(recorded("error_lora_disabled"))
    assert type(error) is ProviderError
    assert "--enable-lora" in str(error)


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
