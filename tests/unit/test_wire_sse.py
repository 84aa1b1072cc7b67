"""Server-sent events by example; `tests/property/test_sse.py` cuts them everywhere."""

import pytest

from genapi.errors import ReplyError
from genapi.wire.sse import SSEDecoder


@pytest.mark.parametrize(
    ("text", "payloads"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [b"a", b"b", b"c"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\n\n", [b""]),
        (b"data:\ndata:\n\n", [b"\n"]),
        (b": ping\n\n: ping\n\ndata: a\n\n", [b"a"]),
        (b"event: x\nid: 7\nretry: 9\ndata: a\n\n", [b"a"]),
        (b"event: x\n\ndata: a\n\n", [b"a"]),
        (b"database: no\ndata x: no\nDATA: no\n\n", []),
        (b"\n\n\ndata: a\n\n\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: \xef\xbb\xbfa\n\n", [b"\xef\xbb\xbfa"]),
        ("data: ✅z\n\n".encode(), ["✅z".encode()]),
        (b"data: a\n", []),
        (b"data: a", []),
    ],
)
def test_the_payloads_of_a_stream(text: bytes, payloads: list[bytes]) -> None:
    assert SSEDecoder().feed(text) == payloads


@pytest.mark.parametrize(
    ("text", "pending"),
    [
        (b"", False),
        (b"data: a\n\n", False),
        (b": ping\n", False),
        (b"\n", False),
        (b"\xef\xbb\xbf", False),
        (b"data: a\n", True),
        (b"data: a", True),
        (b"da", True),
        (b"\xef\xbb", True),
    ],
)
def test_an_event_without_its_end_is_pending(text: bytes, pending: bool) -> None:
    decoder = SSEDecoder()
    decoder.feed(text)
    assert decoder.pending is pending


@pytest.mark.case("STREAM-01")
def test_a_character_may_be_cut_inside() -> None:
    decoder = SSEDecoder()
    pieces = [b'data: {"text":"\xe2', b"\x9c", b'\x85z"}\n\n', b"data: [DONE]\n\n"]
    assert [event for piece in pieces for event in decoder.feed(piece)] == [
        '{"text":"✅z"}'.encode(),
        b"[DONE]",
    ]


def test_a_byte_order_mark_counts_only_at_the_start() -> None:
    decoder = SSEDecoder()
    assert decoder.feed(b"\n") == []
    assert decoder.feed(b"\xef\xbb\xbfdata: a\n\n") == []


def test_an_event_that_never_ends_is_refused() -> None:
    decoder = SSEDecoder()
    line = b"data: " + bytes(2**25) + b"\n"
    for _ in range(7):
        assert decoder.feed(line) == []
    with pytest.raises(ReplyError, match="an event of the stream is longer than 268435456 bytes"):
        decoder.feed(line)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_line_that_never_ends_is_refused(pieces: int) -> None:
    decoder = SSEDecoder()
    piece = bytes((256 << 20) // pieces + 1)
    for _ in range(pieces - 1):
        decoder.feed(piece)
    with pytest.raises(ReplyError, match="longer than 268435456 bytes"):
        decoder.feed(piece)
