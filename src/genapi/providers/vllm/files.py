"""vLLM told to load weights from a directory: `/collective_rpc` with `reload_weights`.

The rule of this file: one call loads everything, or fails and leaves the model in pieces; nothing
is joined, begun or finished. The label is a call of its own, after the load was answered. RUN was
seen on vLLM 0.32.0 (`tests/engines/test_filesystem.py`).

What a failed load leaves is closed as what a failed transfer leaves: a session is started and an
empty one finished, after which a full load is exact. Loading again without that may answer 200 and
serve what is neither version (RUN, a tensor of another shape). So a server that has no sessions,
for want of `--weight-transfer-config`, has to be restarted.
"""

from collections.abc import Mapping
from typing import Any

from genapi.providers.base import WorkerFacts
from genapi.providers.shapes.answers import in_need_of_sessions, unreadable
from genapi.providers.shapes.loads import LOAD_ROWS, VLLM_ROWS, WholeLoad
from genapi.providers.vllm.admin import VLLMAdmin
from genapi.providers.vllm.verdicts import answer_of
from genapi.publication.evidence import (
    Answer,
    Observed,
    Op,
    Reached,
    Row,
    Seen,
    Verdict,
    row,
    verdicts_of,
)
from genapi.publication.plan import PausePlan
from genapi.publication.rules import FILE_RULES
from genapi.types.worker import Evidence, Outcome, Recovery
from genapi.wire.flow import Flow, call
from genapi.wire.http import HTTPCall, json_body

__all__ = ("ROWS", "VLLMFiles")

_SENT = Reached.SENT
_REPUBLISH = Recovery.REPUBLISH
_CLOSE = Recovery.CLOSE_THEN_REPUBLISH
_RESTART = Recovery.RESTART_THEN_PUBLISH

ROWS: tuple[Row, ...] = (
    *FILE_RULES,
    *VLLM_ROWS,
    row(
        Op.UPDATE,
        Observed.REJECTED,
        _SENT,
        Outcome.DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "RUN: a tensor of another shape is replayed, or a load that follows answers 200 and is "
        "wrong",
    ),
    row(
        Op.UPDATE,
        Observed.LOST,
        _SENT,
        Outcome.UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RUN: it goes on loading; what is asked next comes after it",
    ),
    *LOAD_ROWS,
    row(
        Op.READ,
        Observed.DIFFERS,
        _SENT,
        Outcome.DIRTY,
        Evidence.OTHER_CHECKSUM,
        _REPUBLISH,
        "READ: a load replaces every parameter that the files have",
    ),
)


class VLLMFiles(WholeLoad, VLLMAdmin):
    """The operations of one worker as flows, where it loads weights from files."""

    verdicts: Mapping[Seen, Verdict] = verdicts_of(ROWS)

    def check(self, plan: PausePlan, facts: WorkerFacts, *, backend: str) -> None:
        """Refuse a worker that cannot be published to; it needs no backend."""
        del backend
        self.check_server(plan, facts)

    def heal(self) -> Flow[Answer]:
        """Close what an earlier publication left, where the server has sessions to do it with."""
        return in_need_of_sessions((yield from super().heal()))

    def update(self, update_info: Mapping[str, Any], *, attachment: object | None) -> Flow[Answer]:
        """Load the directory `weights_path`; answers when every rank has loaded it."""
        del attachment
        path: str = update_info["weights_path"]
        body: dict[str, Any] = {
            "method": "reload_weights",
            "args": [],
            "kwargs": {"weights_path": path, "is_checkpoint_format": True},
            "timeout": None,
        }
        reply = yield from call(
            HTTPCall(method="POST", path="/collective_rpc", body=json_body(body))
        )
        return unreadable(answer_of(Op.UPDATE, reply), path)
