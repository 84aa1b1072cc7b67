"""Weight-version spans, as vLLM and SGLang attest them: `[{"version", "start", "end"}, ...]`.

The rule of this file: an engine is believed about base weights and nothing else. Spans that do
not cover the tokens exactly once, in order, are a broken reply, never patched up.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from genapi.errors import ReplyError
from genapi.types.policy import PolicyTrace, Span, TraceSource, parse_label

__all__ = ("WireSpan", "trace")


class WireSpan(msgspec.Struct, frozen=True, gc=False):
    """One span on the wire: output tokens `[start, end)` were sampled under label `version`."""

    start: int
    end: int
    version: Any = None


def trace(spans: Sequence[WireSpan] | None, *, tokens: int, run: str | None) -> PolicyTrace:
    """What an engine's spans say about an output of `tokens` tokens.

    Zero-length spans are dropped. Spans keep the engine's boundaries, also between two spans of
    one version. No field, or null, with tokens means that nothing is attested. Contexts are
    UNKNOWN: an engine does not attest them (`publication.context` fills them in).

    Args:
        spans: as they came; None when the reply has none.
        tokens: how many tokens the output has.
        run: labels of another run are UNKNOWN; None = any run.

    Raises:
        ReplyError: the spans do not cover the tokens contiguously from 0.
    """
    if spans is None:
        return PolicyTrace.unknown(tokens)
    at = 0
    built: list[Span] = []
    for span in spans:
        if span.start != at or span.end < span.start:
            raise ReplyError(
                f"weight_versions are not contiguous: expected a span from token {at}, "
                f"got [{span.start}, {span.end}) of {span.version!r}"
            )
        at = span.end
        if span.start == span.end:
            continue
        version = parse_label(span.version, run=run)
        built.append(Span(start=span.start, end=span.end, lo=version, hi=version))
    if at != tokens:
        raise ReplyError(f"weight_versions cover {at} tokens of an output of {tokens}")
    return PolicyTrace(spans=tuple(built), source=TraceSource.ENGINE)
