"""Replies to administration as observations: what does not depend on whose reply it is.

The rule of this file: an error inside a 200 is an error, what something in between has written
proves nothing, and a provider's own patterns come before its statuses.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

from genapi.errors import ReplyError
from genapi.providers.shapes.errors import BAD_GATEWAY, GATEWAY_TIMEOUT
from genapi.publication.evidence import Answer, Observed, Op, Pattern
from genapi.wire.http import HTTPReply

__all__ = (
    "NOT_CONFIGURED",
    "UNREADABLE",
    "in_need_of_sessions",
    "matched",
    "unless_failed",
    "unreadable",
)

_FAILED = ("error", "failed")  # engines that did it say "paused", "resumed", "ok"

NOT_CONFIGURED = "Weight transfer not configured"
"""What vLLM says where it has no sessions, for want of `--weight-transfer-config`."""

UNREADABLE = (
    r"Repo id must |Cannot find any model weights|deserializing header|"
    r"No such file or directory|Permission denied|Input/output error|Stale file handle"
)
"""What vLLM says of a directory that is not there or empty, and of a file that is cut short."""


def unless_failed(reply: HTTPReply) -> Answer | None:
    """The answer that a 2xx is; None = it is none, or its body reports a failure."""
    if not reply.ok:
        return None
    try:
        body = reply.json_object() if reply.body else {}
    except ReplyError as error:
        # Something in between has written it: what the worker did nobody can say.
        return Answer(Observed.LOST, str(error))
    failed = bool(body.get("error")) or body.get("success") is False
    return None if failed or body.get("status") in _FAILED else Answer(Observed.DONE)


def matched(
    op: Op, reply: HTTPReply, *, text: str, detail: str, patterns: Iterable[Pattern]
) -> Answer | None:
    """The answer that the text of a failure shows; None = its status has to tell.

    Args:
        op: what was asked.
        reply: the failure.
        text: what its body says.
        detail: that in words for messages.
        patterns: the provider's; the first that fits counts.
    """
    for pattern in patterns:
        if (not pattern.ops or op in pattern.ops) and re.search(pattern.text, text):
            return Answer(pattern.observed, detail)
    if reply.status in (BAD_GATEWAY, GATEWAY_TIMEOUT):
        # Something in between gave up on the worker, which may have acted.
        return Answer(Observed.LOST, detail)
    return None


def unreadable(answer: Answer, path: str) -> Answer:
    """The answer to a load of `path`; where that could not be read, with the remedy."""
    if answer.observed is not Observed.UNREADABLE:
        return answer
    remedy = (
        f"{answer.detail} (it was told to load {path!r}: the directory has to be mounted on the "
        "worker's machine and readable for the server; where its path is another one there, pass "
        "weights.Filesystem(dir, worker_dir=...))"
    )
    return replace(answer, detail=remedy)


def in_need_of_sessions(answer: Answer) -> Answer:
    """The answer of vLLM that was to be healed; where it has no sessions, with the remedy."""
    if NOT_CONFIGURED not in answer.detail:
        return answer
    remedy = "started with --weight-transfer-config it could be healed without a restart"
    return replace(answer, detail=f"{answer.detail} ({remedy})")
