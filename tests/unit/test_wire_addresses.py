"""From a target to the URL of a call."""

from itertools import product

import pytest

import genapi
from genapi.errors import ConfigError
from genapi.transports.http import call_url
from genapi.types.config import FleetConfig, base_url, parse_target
from genapi.wire.http import HTTPCall

BASES = {
    "h:1": "http://h:1",
    "http://h:1": "http://h:1",
    "http://h:1/": "http://h:1",
    "http://h:1/v1": "http://h:1",
    "http://h:1/v1/": "http://h:1",
    "http://H.Example:1": "http://h.example:1",
    "https://h:1/v1": "https://h:1",
    "http://h:1/prefix": "http://h:1/prefix",
    "http://h:1/prefix/": "http://h:1/prefix",
    "http://h:1/prefix/v1/": "http://h:1/prefix",
    "http://h:1/v1/rl": "http://h:1/v1/rl",
    "http://h:1/apiv1": "http://h:1/apiv1",
    "[::1]:1": "http://[::1]:1",
}
ROUTES = ("/v1/models", "/inference/v1/generate", "/pause", "/generate")


@pytest.mark.case("CONF-01")
@pytest.mark.parametrize(("address", "route"), [*product(BASES, ROUTES)])
def test_every_spelling_of_a_base_gives_the_intended_url(address: str, route: str) -> None:
    url = call_url(base_url(address, scheme="http"), HTTPCall(method="GET", path=route))
    assert url == BASES[address] + route


def test_what_a_path_or_a_query_may_not_hold_is_quoted() -> None:
    call = HTTPCall(method="GET", path="/a b?c#d\r\n", query={"k&": "v =\n/é"})
    assert call_url("http://h:1", call) == (
        "http://h:1/a%20b%3Fc%23d%0D%0A?k%26=v%20%3D%0A%2F%C3%A9"
    )


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "names no host"),
        (":8000", "names no host"),
        ("http://", "names no host"),
        ("h", "names no port"),
        ("http://h", "names no port"),
        ("h:0", "names no port"),
        ("h:65536", "not host:port"),
        ("h:x", "not host:port"),
        ("[::1:8000", "not host:port"),
        ("h:1?a=b", "query"),
        ("h:1#a", "fragment"),
        ("user:secret@h:1", "user info"),
        ("ftp://h:1", "http"),
    ],
)
def test_an_address_that_cannot_work_says_why(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        base_url(address, scheme="http")


@pytest.mark.parametrize(
    "address",
    [
        "user:secret@h:99999",
        "user:secret@h",
        "user:secret@:1",
        "http://user:secret@h:1?x=1",
        "http://user:secret/@h:1",
    ],
)
def test_an_address_with_a_password_never_shows_it(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        base_url(address, scheme="http")
    assert "secret" not in str(caught.value)


def test_a_list_of_workers_gets_requests_and_administration() -> None:
    target = parse_target("vllm://w1:8001, w2:8002")
    assert target.provider == "vllm"
    assert target.requests == target.workers == ("http://w1:8001", "http://w2:8002")
    assert (target.routed, target.discovery, target.carrier) == (False, None, "http")


def test_a_router_gets_requests_and_the_workers_administration() -> None:
    target = parse_target("sglang+https://router:8000/v1?workers=w1:8001,http://w2:8001")
    assert target.requests == ("https://router:8000",)
    assert target.workers == ("https://w1:8001", "http://w2:8001")
    assert target.routed


@pytest.mark.parametrize("found", ["discover", "dns:workers:8000", "file:/etc/workers"])
def test_workers_may_be_found_elsewhere(found: str) -> None:
    target = parse_target(f"vllm://router:8000?workers={found}")
    assert (target.workers, target.discovery, target.routed) == ((), found, True)


def test_an_embedded_target_keeps_its_query() -> None:
    target = parse_target("embedded://?protocol=sglang&workers=2")
    assert (target.provider, target.carrier) == ("sglang", "embedded")
    assert target.query == {"protocol": "sglang", "workers": "2"}
    assert parse_target("embedded://").provider == "vllm"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("w1:8001", "no scheme"),
        ("://w1:8001", "PROVIDER"),
        ("vllm+ftp://w1:8001", "PROVIDER"),
        ("http://127.0.0.1:8000", "no provider; write for example vllm://127.0.0.1:8000$"),
        ("https://w1:8001", r"no provider; write for example vllm\+https://w1:8001$"),
        ("vllm://", "no address"),
        ("vllm://,", "no address"),
        ("vllm://w1:8001,w1:8001", "twice"),
        ("vllm://w1:8001,http://W1:8001/v1", "twice"),
        ("vllm://r:1?workers=w1:8001,w1:8001", "twice"),
        ("vllm://r:1?workers=", "workers"),
        ("vllm://r:1?workers", "query"),
        ("vllm://r:1?workers=a:1&workers=b:1", "twice"),
    ],
)
def test_a_target_that_cannot_be_read_says_why(target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        genapi.connect(target)
    with pytest.raises(ValueError, match=words.removesuffix("$")):
        FleetConfig(target=target)


@pytest.mark.parametrize(
    "target",
    [
        "vllm://me:secret@w1:8001",
        "vllm://w1:8001,me:secret@w2:8001?nosuch=1",
        "vllm://r:1?workers=me:secret@w1:1&workers=me:secret@w2:1",
        "vllm://r:1?workers=http://me:secret@w1:1&nosuch=1",
        "vllm://r:1?me:secret@w1:1",
        "me:secret@w1:8001",
        "me:secret@w1://8001",
        "vllm://me:se@cret@w1:8001?nosuch=1",
    ],
)
def test_a_target_that_cannot_be_read_is_refused_without_its_passwords(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        genapi.connect(target)
    assert "secret" not in str(caught.value)
    assert "cret@" not in str(caught.value)


def test_an_address_without_a_provider_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"vllm://w1:8001$") as caught:
        genapi.connect("http://me:secret@w1:8001")
    assert "secret" not in str(caught.value)


def test_a_provider_that_is_not_known_is_told_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"known are dynamo, .*sglang, .*vllm, and embedded"):
        genapi.connect("nosuch://w1:8001")


@pytest.mark.parametrize(
    ("target", "listing"),
    [
        ("dynamo://h:8000", None),
        ("dynamo://h:8000?discovery=8001", "http://h:8001"),
        ("dynamo+https://h:8000?discovery=8001", "https://h:8001"),
        ("dynamo://[::1]:8000?discovery=8001", "http://[::1]:8001"),
        ("dynamo://h:8000?discovery=d:9", "http://d:9"),
        ("dynamo://h:8000?discovery=https://d:9", "https://d:9"),
    ],
)
def test_a_target_may_name_where_workers_are_listed(target: str, listing: str | None) -> None:
    assert parse_target(target).listing == listing


@pytest.mark.parametrize("given", ["", "99999", "d", "u:p@d:9", "0"])
def test_a_list_at_no_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        parse_target(f"dynamo://h:8000?discovery={given}")
