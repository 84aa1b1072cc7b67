"""Server-sent events: bytes in any pieces go in, whole `data` payloads come out."""

from genapi.errors import ReplyError

__all__ = ("SSEDecoder",)

_BOM = b"\xef\xbb\xbf"
_LONGEST_LINE = 256 << 20


class SSEDecoder:
    """Splits a byte stream into the data of its events.

    Pieces may be cut anywhere, also inside a character or a CRLF. Comments and fields other
    than `data` are dropped; several data lines of one event are joined by a line feed.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._skip_lf = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads of the events that `chunk` completes.

        Raises:
            ReplyError: a line never ends.
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
        if len(self._rest) + len(chunk) > _LONGEST_LINE:
            raise ReplyError(f"a line of the stream is longer than {_LONGEST_LINE} bytes")
        if b"\n" not in chunk and b"\r" not in chunk:
            # The line is looked at once, when it ends: in small pieces it costs no more.
            self._rest += chunk
            return []
        *lines, rest = self._lines(bytes(self._rest) + chunk)
        self._rest[:] = rest
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                value = line[5:]
                self._data.append(value[1:] if value.startswith(b" ") else value)
            elif not line and self._data:
                events.append(b"\n".join(self._data) if len(self._data) > 1 else self._data[0])
                self._data.clear()
            elif line == b"data":
                self._data.append(b"")
        return events

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
