"""However the network cuts a stream, its events are the same."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genapi.wire.sse import SSEDecoder

LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINES = st.sampled_from(
    [
        b"",
        b"data: {}",
        b"data:",
        b"data",
        "data: ✅z".encode(),
        b"data: [DONE]",
        b"data: \xef\xbb\xbf",
        b"\xef\xbb\xbfdata: a",
        b": comment",
        b"event: error",
        b"id: 1",
        b"junk",
    ]
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Text of a stream, well formed or not, with or without a byte order mark and an end."""
    lines = draw(st.lists(st.tuples(LINES, LINE_ENDS), max_size=12))
    mark = draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    tail = draw(st.sampled_from([b"", b"data: cut", b"\xe2"]))
    return mark + b"".join(line + end for line, end in lines) + tail


@st.composite
def cut(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A stream and the same in pieces, empty ones among them."""
    text = draw(streams())
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    edges = [0, *places, len(text)]
    return text, [text[a:b] for a, b in pairwise(edges)]


def events(pieces: list[bytes]) -> tuple[list[bytes], bool]:
    decoder = SSEDecoder()
    found = [event for piece in pieces for event in decoder.feed(piece)]
    return found, decoder.pending


def reference(text: bytes) -> list[bytes]:
    """The specification, line by line, with the whole text at hand."""
    text = text.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    found: list[bytes] = []
    data: list[bytes] = []
    for line in text.split(b"\n")[:-1]:
        name, _, value = line.partition(b":")
        if not line:
            if data:
                found.append(b"\n".join(data))
            data = []
        elif name == b"data":
            data.append(value.removeprefix(b" "))
    return found


@pytest.mark.case("STREAM-01")
@given(cut())
def test_no_cut_changes_what_arrives(case: tuple[bytes, list[bytes]]) -> None:
    text, pieces = case
    assert events(pieces) == events([text])


@given(streams())
def test_byte_by_byte_is_like_at_once(text: bytes) -> None:
    assert events([text[i : i + 1] for i in range(len(text))]) == events([text])


@given(streams())
def test_what_arrives_is_what_the_specification_says(text: bytes) -> None:
    assert events([text])[0] == reference(text)


@given(st.binary(max_size=60))
def test_no_bytes_are_an_error(text: bytes) -> None:
    assert events([text])[0] == reference(text)
