"""What errors show of a text that somebody else wrote."""

import pytest

from genapi import GenAPIError, ReplyError
from genapi.shown import has_user_info

LONG = 300_000
"""A reading that looks at every character once for every other would take minutes."""


@pytest.mark.parametrize(
    ("part", "end"),
    [
        ("A", " a@b"),
        ("A", "@"),
        ("a:", " a@b"),
        (":", "@"),
        ("@", ""),
        ("a:@", ""),
        ("'=", ":@"),
        ("http://", "@"),
        ("http://h:1@1@", ""),
        ("h:1@1@", ""),
        ("1", ":1@1"),
    ],
)
def test_a_long_text_of_a_peer_does_not_hold_up_whoever_raises_an_error(
    part: str, end: str
) -> None:
    text = part * LONG + end
    assert len(str(GenAPIError(text))) > 1
    assert len(str(ReplyError("no JSON", body=text.encode()))) < 1000
    assert has_user_info(text) in (True, False)


def test_a_long_message_is_shown_to_its_end() -> None:
    message = "x" * LONG + " at http://user:hunter2@h:1/path, and so on"
    assert str(GenAPIError(message)) == message.replace("user:hunter2", "...")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:hunter2@h:1/a@b", "http://...@h:1/a@b"),
        ("http://user:hun@ter2@h:1", "http://...@h:1"),
        ("http://hunter2@h, https://hunter2@g", "http://...@h, https://...@g"),
        ("user:hunter2@h:1", "...@h:1"),
        ("url=user:hunter2@h,user:hunter2@g", "url=...@h,...@g"),
        ("'user:hunter2@h'", "'...@h'"),
        ("user:hunter2@h@user:hunter2@g", "...@h@...@g"),
        ("mail user@h at 10:30", "mail user@h at 10:30"),
    ],
)
def test_no_error_shows_what_may_be_a_password(text: str, shown: str) -> None:
    assert str(GenAPIError(text)) == shown


@pytest.mark.parametrize(
    "text",
    [
        "http://host:30000@1 is full",
        "http://a:1@0,http://a:1@1",
        "no reply from 'http://[::1]:30000@12'.",
        "10.0.0.1:30000@3: down",
    ],
)
def test_an_error_names_a_rank_of_a_gateways_worker_by_its_address(text: str) -> None:
    assert str(GenAPIError(text)) == text
    assert not has_user_info(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:hunter2@h:1@1", "http://...@h:1@1"),
        ("http://user:hunter2@1", "http://...@1"),
        ("http://hunter2@1", "http://...@1"),
        ("http://user:1234@10.0.0.1", "http://...@10.0.0.1"),
        ("http://user:1234@1:80", "http://...@1:80"),
        ("http://user:1234@1-a", "http://...@1-a"),
        ("user:hunter2@h:1@1", "...@h:1@1"),
    ],
)
def test_what_only_resembles_a_rank_is_shown_without_user_info(text: str, shown: str) -> None:
    assert str(GenAPIError(text)) == shown
