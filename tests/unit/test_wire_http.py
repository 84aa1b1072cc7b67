"""Calls and replies as values."""

import math

import pytest

from genapi.errors import ConfigError, ReplyError
from genapi.wire.flow import call, calls
from genapi.wire.http import HTTPCall, HTTPReply, json_body
from genapi.wire.origin import is_loopback, origin

URL = "http://w1:8001/load"


def test_a_call_names_itself() -> None:
    assert str(HTTPCall(method="GET", path="/load")) == "GET /load"
    named = HTTPCall(method="POST", path="/pause", query={"mode": "keep", "clear_cache": "true"})
    assert str(named) == "POST /pause?mode=keep&clear_cache=true"


@pytest.mark.parametrize(
    ("status", "ok"), [(199, False), (200, True), (204, True), (299, True), (300, False)]
)
def test_only_2xx_is_ok(status: int, ok: bool) -> None:
    assert HTTPReply(status).ok is ok


def test_a_body_of_json_is_read() -> None:
    assert HTTPReply(200, b'{"a":[1,null]}').json_object() == {"a": [1, None]}
    assert HTTPReply(200, b" [1] ").json() == [1]


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"a":', b'{"a":1}x', b"NaN", b"\xff"])
def test_a_body_that_is_not_json_breaks_the_contract(body: bytes) -> None:
    with pytest.raises(ReplyError, match="expected JSON from http://w1:8001/load") as caught:
        HTTPReply(502, body, {}, URL).json()
    assert (caught.value.body, caught.value.status, caught.value.url) == (body, 502, URL)


@pytest.mark.parametrize("body", [b"[]", b"1", b"null", b'"x"'])
def test_json_that_is_not_an_object_breaks_the_contract_where_one_is_expected(body: bytes) -> None:
    with pytest.raises(ReplyError, match="expected a JSON object") as caught:
        HTTPReply(200, body, {}, URL).json_object()
    assert caught.value.body == body


def test_what_json_has_no_number_for_is_written_as_null() -> None:
    assert json_body({"a": math.nan, "b": math.inf, "c": 0.1}) == b'{"a":null,"b":null,"c":0.1}'


def test_replies_without_headers_share_none() -> None:
    one, other = HTTPReply(200), HTTPReply(200)
    assert one.headers == {}
    assert one.headers is not other.headers


def test_a_flow_that_is_sent_the_wrong_number_of_replies_says_so() -> None:
    get, reply = HTTPCall(method="GET", path="/a"), HTTPReply(200)
    single = call(get)
    assert next(single) is get
    with pytest.raises(TypeError, match="one call"):
        single.send((reply,))
    several = calls(get, get)
    assert next(several) == (get, get)
    with pytest.raises(TypeError, match="2 calls"):
        several.send((reply,))


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://h:1/v1?x#y", "http://h:1"),
        ("HTTPS://H.Example", "https://h.example:443"),
        ("http://h", "http://h:80"),
        ("http://[2001:DB8::1]:8/x", "http://[2001:db8::1]:8"),
        ("http://user:pw@h:1", "http://h:1"),
        ("memory://0", "memory://0"),
    ],
)
def test_the_origin_of_a_url(url: str, found: str) -> None:
    assert origin(url) == found


def test_what_is_no_url_has_no_origin_and_shows_no_password() -> None:
    with pytest.raises(ValueError, match="scheme://host:port") as caught:
        origin("user:secret@h:1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("a.localhost", True),
        ("127.0.0.1", True),
        ("127.200.0.9", True),
        ("[::1]", True),
        ("128.0.0.1", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("notlocalhost", False),
        ("127.0.0.1.example", False),
    ],
)
def test_loopback_is_what_is_written_as_this_host(host: str, here: bool) -> None:
    assert is_loopback(f"http://{host}:8000") is here


@pytest.mark.parametrize("body", [b"[1]", b"<html>"])
def test_an_answer_that_cannot_be_read_says_where_it_came_from(body: bytes) -> None:
    reply = HTTPReply(503, body, {}, "http://w1:8001/health")
    with pytest.raises(ReplyError, match=r"from http://w1:8001/health \(status 503\)") as caught:
        reply.json_object()
    error = caught.value
    assert (error.body, error.status, error.url) == (body, 503, "http://w1:8001/health")


def test_what_has_no_form_in_json_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ConfigError, match=r"cannot be written as JSON: .*object"):
        json_body({"options": object()})


@pytest.mark.parametrize("url", ["http://h:65536", "http://h:x", "http://[::1:8000"])
def test_a_url_that_cannot_be_taken_apart_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an origin") as caught:
        origin(url)
    assert repr(url) in str(caught.value)


def test_a_url_without_a_host_is_not_on_this_host() -> None:
    assert not is_loopback("http://:8000")


def test_a_password_with_an_at_sign_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        origin("//user:p@ss@host")
    assert str(caught.value) == "'host' is not an origin; write scheme://host:port"


def test_a_field_that_is_missing_is_named_with_what_came_instead() -> None:
    reply = HTTPReply(200, b'{"a":null}', {}, URL)
    assert reply.json_field("a") is None
    with pytest.raises(ReplyError, match=rf"expected 'b' from {URL}") as caught:
        reply.json_field("b")
    assert (caught.value.body, caught.value.status, caught.value.url) == (reply.body, 200, URL)
