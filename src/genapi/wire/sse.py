"""Server-sent events: bytes in any pieces go in, whole `data` payloads come out."""

from genapi.errors import ReplyError
from genapi.wire.http import LARGEST_BODY

__all__ = ("SSEDecoder",)

_BOM = b"\xef\xbb\xbf"


class SSEDecoder:
    """Splits a byte stream into the data of its events.

    Pieces may be cut anywhere, also inside a character or a CRLF. Comments and fields other
    than `data` are dropped; several data lines of one event are joined by a line feed.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._skip_lf = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads of the events that `chunk` completes.

        Raises:
            ReplyError: a line, or an event, never ends.
        """
        if self._at_start:
            chunk = bytes(self._rest) + chunk
            self._rest.clear()
            if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
                self._rest += chunk
                return []
            chunk = chunk.removeprefix(_BOM)
            self._at_start = False
        if self._skip_lf and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._skip_lf = False
        if len(self._rest) + len(chunk) > LARGEST_BODY:
            raise ReplyError(f"a line of the stream is longer than {LARGEST_BODY} bytes")
        if b"\n" not in chunk and b"\r" not in chunk:
            # The line is looked at once, when it ends: in small pieces it costs no more.
            self._rest += chunk
            return []
        *lines, rest = self._lines(bytes(self._rest) + chunk)
        self._rest[:] = rest
        return [event for line in lines if (event := self._take(line)) is not None]

    def _take(self, line: bytes) -> bytes | None:
        """Take in one line; returns the event that it ends."""
        if line.startswith(b"data:"):
            value = line[5:]
            self._hold(value[1:] if value.startswith(b" ") else value)
        elif line == b"data":
            self._hold(b"")
        elif not line and self._data:
            event = b"\n".join(self._data) if len(self._data) > 1 else self._data[0]
            self._data.clear()
            self._size = 0
            return event
        return None

    def _hold(self, value: bytes) -> None:
        self._size += len(value) + 1
        if self._size > LARGEST_BODY:
            raise ReplyError(f"an event of the stream is longer than {LARGEST_BODY} bytes")
        self._data.append(value)

    def _lines(self, text: bytes) -> list[bytes]:
        if b"\r" in text:
            # A CR at the very end ends its line now; the LF that may follow is skipped later.
            self._skip_lf = text.endswith(b"\r")
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return text.split(b"\n")

    @property
    def pending(self) -> bool:
        """Whether an event has begun that no blank line ended."""
        return bool(self._data or self._rest)
