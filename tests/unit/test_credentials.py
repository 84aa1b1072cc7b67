"""Which key goes where, and which header carries it."""

import logging
import pathlib
import pickle
from itertools import product
from typing import Any

import pytest

from genapi.credentials import Credentials, admin_grant, data_grant, resolve
from genapi.errors import ConfigError
from genapi.types.config import FleetConfig, Key

ROUTER = "http://router:8000"
WORKER = "http://w1:8001"
SECRET = "sk-very-secret"


def of(target: str = "vllm://router:8000?workers=w1:8001", **options: Any) -> Credentials:
    environment = {"DATA": "data", "ADMIN": "admin"}
    return Credentials.of(
        FleetConfig.model_validate({"target": target, **options}), environment=environment
    )


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---------------------------------------------------------------------------------- the decision

SAME, OTHER = "http://router:8000", "http://w2:8001"


@pytest.mark.parametrize(
    ("url", "has_admin_key", "is_named", "grant"),
    [
        (SAME, False, True, "data"),
        (SAME, True, True, "admin"),
        (OTHER, False, True, None),
        (OTHER, True, True, "admin"),
        (OTHER, False, False, None),
        (OTHER, True, False, None),
    ],
)
def test_administration_gets_the_key_that_the_table_says(
    url: str, has_admin_key: bool, is_named: bool, grant: str | None
) -> None:
    found = admin_grant(url, request_origins=[SAME], has_admin_key=has_admin_key, is_named=is_named)
    assert found == grant


DISCOVERED = "sglang://gateway:30000?workers=discover"


@pytest.mark.parametrize(
    ("target", "options", "url", "is_sent"),
    [
        # hosts that the configuration names, at any port
        (DISCOVERED, {}, "http://gateway:41234", True),
        (DISCOVERED, {}, "http://GATEWAY:1", True),
        (DISCOVERED, {"discovery_url": "lists:9"}, "http://lists:41234", True),
        ("dynamo://front:8000?discovery=lists:9", {}, "http://lists:41234", True),
        ("vllm://router:8000?workers=w1:8001", {}, "http://w1:8001", True),
        # others
        (DISCOVERED, {}, "http://10.1.2.3:8000", False),
        (DISCOVERED, {}, "http://gateway.evil.example:30000", False),
        (DISCOVERED, {}, "http://gateway:30000@evil.example:1", False),
        ("vllm://router:8000?workers=w1:8001", {}, "http://w2:8001", False),
        # this host has many names, and is another one than the list's where that is elsewhere
        ("dynamo://127.0.0.1:8000", {}, "http://localhost:41234", True),
        ("dynamo://localhost:8000", {}, "http://[::1]:41234", True),
        (DISCOVERED, {}, "http://127.0.0.1:6379", False),
        ("dynamo://127.0.0.1:8000", {}, "http://10.1.2.3:8000", False),
        # allowed ones
        *[
            (DISCOVERED, {"allowed_origins": [pattern]}, url, is_sent)
            for pattern, url, is_sent in [
                ("http://10.1.2.3:8000", "http://10.1.2.3:8000", True),
                ("http://10.1.2.3:8000", "http://10.1.2.3:8001", False),
                ("http://10.1.2.3:*", "http://10.1.2.3:8001", True),
                ("http://10.1.2.3:*", "https://10.1.2.3:8001", False),
                ("http://10.1.*.*:*", "http://10.1.200.3:8001", True),
                ("http://10.1.*.*:*", "http://10.2.0.3:8001", False),
                ("http://10.1.*.*:*", "http://10.1.evil.example:8001", False),
                ("http://10.1.*.*:*", "http://10.1.2.3.evil.example:8001", False),
                ("https://*.pods.example:*", "https://a.b.pods.example:1", True),
                ("https://*.PODS.example", "https://a.pods.example", True),
                ("https://*.pods.example:*", "https://pods.example:1", False),
                ("https://*.pods.example:*", "https://evilpods.example:1", False),
                ("https://*.pods.example:*", "https://a.pods.example.evil:1", False),
                ("http://[fd00::1]:*", "http://[fd00::1]:9", True),
                ("http://*:*", "http://anywhere.example:9", True),
                ("http://*:9", "http://anywhere.example:10", False),
            ]
        ],
    ],
)
def test_the_admin_key_goes_to_hosts_that_are_configured_or_allowed_and_not_to_whoever_is_listed(
    target: str, options: dict[str, Any], url: str, is_sent: bool
) -> None:
    credentials = of(target, api_key="env:DATA", admin_api_key="env:ADMIN", **options)
    assert credentials.admin_headers(url) == (bearer("admin") if is_sent else {})
    assert credentials.admin_headers(url, "data") == (bearer("data") if is_sent else {})
    assert (credentials.withheld(url) is None) == is_sent


def test_a_key_that_is_withheld_is_said_once_with_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    credentials = of(DISCOVERED, admin_api_key="env:ADMIN")
    with caplog.at_level(logging.WARNING):
        for url in ("http://10.1.2.3:8000/pause", "http://10.1.2.4:8000"):
            credentials.admin_headers(url)
    (record,) = caplog.records
    said = "no key is sent to http://10.1.2.3:8000, which only the list of workers names: add it"
    assert record.getMessage().startswith(said)


def test_nothing_is_withheld_where_there_is_no_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert of(DISCOVERED).admin_headers("http://10.1.2.3:8000") == {}
        assert of(DISCOVERED, api_key="env:DATA").admin_headers("http://10.1.2.3:8000") == {}
    assert not caplog.records


@pytest.mark.parametrize(("url", "grant"), [(SAME, "data"), (OTHER, None)])
def test_requests_carry_the_data_key_to_known_origins_only(url: str, grant: str | None) -> None:
    assert data_grant(url, request_origins=[SAME]) == grant


@pytest.mark.parametrize(
    "other",
    [
        "https://router:8000",
        "http://router:8001",
        "http://router",
        "http://router.evil.example:8000",
        "http://evil.example:8000/router:8000",
        "http://router:8000@evil.example:8000",
        "http://evil.example:8000#http://router:8000",
    ],
)
def test_an_address_that_only_looks_like_the_origin_gets_nothing(other: str) -> None:
    assert data_grant(other, request_origins=[SAME]) is None


def test_path_case_and_default_port_do_not_change_an_origin() -> None:
    origins = ["https://router:443"]
    for url in ("https://ROUTER/v1", "https://router:443/x", "HTTPS://router"):
        assert data_grant(url, request_origins=origins) == "data"


def test_without_a_data_key_only_the_admin_key_is_ever_sent() -> None:
    credentials = of(admin_api_key="env:ADMIN")
    assert credentials.data_headers(ROUTER) == {}
    assert credentials.admin_headers(WORKER) == bearer("admin")


def test_the_data_key_stays_with_the_router_when_the_workers_are_elsewhere() -> None:
    credentials = of(api_key="env:DATA")
    assert credentials.data_headers(ROUTER) == bearer("data")
    assert credentials.admin_headers(WORKER) == {}


@pytest.mark.case("AUTH-01")
def test_every_administration_call_to_the_origin_of_requests_carries_the_key() -> None:
    # A 200 without a key proves nothing: vLLM guards only some prefixes. So the path is not asked.
    credentials = of("vllm://127.0.0.1:8001", api_key="env:DATA")
    assert credentials.admin_headers("http://127.0.0.1:8001") == bearer("data")


def test_the_admin_key_replaces_the_data_key_for_administration() -> None:
    credentials = of("vllm://w1:8001", api_key="env:DATA", admin_api_key="env:ADMIN")
    assert credentials.data_headers(WORKER) == bearer("data")
    assert credentials.admin_headers(WORKER) == bearer("admin")


@pytest.mark.parametrize(
    ("options", "url", "key"),
    [
        ({"api_key": "env:DATA"}, ROUTER, "data"),
        ({"api_key": "env:DATA"}, WORKER, None),
        ({"admin_api_key": "env:ADMIN"}, WORKER, "admin"),
        ({"api_key": "env:DATA", "admin_api_key": "env:ADMIN"}, ROUTER, "data"),
        ({"api_key": "env:DATA", "admin_api_key": "env:ADMIN"}, WORKER, "data"),
        ({"api_key": "env:UNSET", "admin_api_key": "env:ADMIN"}, WORKER, "admin"),
        ({}, WORKER, None),
    ],
)
def test_a_read_that_takes_the_key_of_requests_gets_it_where_administration_has_a_key(
    options: dict[str, str], url: str, key: str | None
) -> None:
    expected = {} if key is None else bearer(key)
    assert of(**options).admin_headers(url, "data") == expected


def test_a_call_of_administration_never_carries_the_key_of_requests_when_there_are_two() -> None:
    credentials = of(api_key="env:DATA", admin_api_key="env:ADMIN")
    for url in (ROUTER, WORKER, "memory://0"):
        assert credentials.admin_headers(url, "admin") == bearer("admin")
    assert credentials.admin_headers("memory://0", "data") == bearer("data")


def test_an_allowed_origin_does_not_get_the_data_key() -> None:
    credentials = of(api_key="env:DATA", allowed_origins=[WORKER + "/"])
    assert credentials.admin_headers(WORKER) == {}


def test_engines_in_this_process_get_the_key() -> None:
    credentials = of("embedded://?workers=2", api_key="env:DATA")
    assert credentials.data_headers("memory://1") == bearer("data")
    assert credentials.admin_headers("memory://1") == bearer("data")


@pytest.mark.parametrize(
    "origin",
    [
        "w1:8001",
        "http://",
        "http://h:99999",
        "",
        "*",
        "http://:*",
        "http://w*.example:1",
        "http://a.*.example:1",
        "http://*.*.example:1",
        "http://10.1.*:1",
    ],
)
def test_an_allowed_origin_that_is_none_is_a_configuration_error(origin: str) -> None:
    with pytest.raises(ConfigError, match="scheme://host:port"):
        of(allowed_origins=[origin])


# ---------------------------------------------------------------------------------- the key itself


@pytest.mark.case("AUTH-03")
@pytest.mark.parametrize("value", [None, "", "  ", "\t", "\n", " \r\n "])
def test_an_unset_or_blank_variable_means_no_authorization_header_at_all(value: str | None) -> None:
    environment = {} if value is None else {"K": value}
    assert resolve(Key("env:K"), environment=environment) is None
    config = FleetConfig.model_validate({"target": "vllm://w1:8001", "api_key": "env:K"})
    credentials = Credentials.of(config, environment=environment)
    assert credentials.data_headers(WORKER) == {}
    assert credentials.admin_headers(WORKER) == {}


@pytest.mark.case("AUTH-03")
@pytest.mark.parametrize("text", [f"{SECRET}\n", f"{SECRET}\nx", f"a\r{SECRET}"])
def test_a_line_break_in_a_key_is_refused_where_it_is_configured(text: str) -> None:
    for attempt in (
        lambda: resolve(Key("env:K"), environment={"K": text}),
        lambda: Key(text),
    ):
        with pytest.raises(ConfigError, match="line break") as caught:
            attempt()
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("text", ["schlüssel", "a\x00b", "a\x7fb", "key\u2028"])
def test_a_key_that_no_header_can_carry_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="header cannot carry"):
        resolve(Key("env:K"), environment={"K": text})


def test_blanks_around_a_key_are_dropped() -> None:
    assert resolve(Key("env:K"), environment={"K": "  k1 \t"}) == "k1"
    assert resolve(Key(" literal "), environment={}) == "literal"
    assert resolve(None, environment={}) is None


def test_a_blank_literal_is_no_key() -> None:
    assert resolve(Key("   "), environment={}) is None


@pytest.mark.parametrize("text", ["k1", "k1\n", "k1\r\n", "k1\n\n", " k1 "])
def test_a_key_file_may_end_in_line_feeds(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "key").write_bytes(text.encode())
    assert resolve(Key(f"file:{tmp_path}/key"), environment={}) == "k1"


def test_a_blank_key_file_is_no_key(tmp_path: pathlib.Path) -> None:
    (tmp_path / "key").write_text(" \n", encoding="utf-8")
    assert resolve(Key(f"file:{tmp_path}/key"), environment={}) is None


@pytest.mark.parametrize("content", [b"a\nb", b"\xff\xfe"])
def test_a_key_file_that_holds_no_key_is_refused(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match="key"):
        resolve(Key(f"file:{tmp_path}/key"), environment={})


def test_a_key_file_that_is_not_there_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"file:/nowhere/key.*No such file"):
        resolve(Key("file:/nowhere/key"), environment={})


@pytest.mark.parametrize("reference", ["env:", "file:"])
def test_a_reference_to_nothing_is_a_configuration_error(reference: str) -> None:
    with pytest.raises(ConfigError, match="names nothing"):
        resolve(Key(reference), environment={})


def test_credentials_show_no_key_and_do_not_travel() -> None:
    credentials = Credentials(data_key=SECRET, admin_key=None, request_origins=[ROUTER])
    assert SECRET not in repr(credentials) + str(credentials)
    assert repr(credentials) == "Credentials(data key)"
    with pytest.raises(ConfigError, match="pickled"):
        pickle.dumps(credentials)


# ---------------------------------------------------------------------------------- the warning


@pytest.mark.case("AUTH-01")
def test_a_key_in_the_clear_to_another_host_gives_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    credentials = of(admin_api_key="env:ADMIN")
    with caplog.at_level(logging.WARNING):
        for url in (WORKER, WORKER, "http://w1:8002"):
            credentials.admin_headers(url)
    (record,) = caplog.records
    assert WORKER in record.getMessage()
    assert "admin" not in record.getMessage().replace("administration", "")


@pytest.mark.case("AUTH-01")
@pytest.mark.parametrize(
    ("url", "options"),
    [
        *product(
            [
                "http://127.0.0.1:8001",
                "http://127.9.9.9:8001",
                "http://[::1]:8001",
                "http://localhost:8001",
                "https://w1:8001",
                "memory://0",
            ],
            [{"admin_api_key": "env:ADMIN"}],
        ),
        (WORKER, {"admin_api_key": "env:ADMIN", "allowed_origins": [WORKER]}),
        (WORKER, {}),
    ],
)
def test_no_warning_without_a_key_or_another_host_or_when_accepted(
    url: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    target = "embedded://" if url == "memory://0" else f"vllm://router:8000?workers={url}"
    with caplog.at_level(logging.WARNING):
        of(target, **options).admin_headers(url)
    assert not caplog.records
