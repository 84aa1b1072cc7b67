"""SGLang told to load weights from a directory: `/update_weights_from_disk`.

The rule of this file: one call loads everything, every option is sent, and the label is a call of
its own, after the load was answered. RUN was seen on SGLang 0.5.23
(`tests/engines/test_filesystem.py`); READ is in its source only.

No session is needed, and replicas (`--dp-size`) load as well. A directory that is not there, or has
no weights, is refused before anything is touched. Whatever fails later takes the server down: to go
back to the old weights it reads the same files again (READ weight_updater.py).
"""

from collections.abc import Mapping
from typing import Any

from genapi.providers.base import WorkerFacts
from genapi.providers.sglang.admin import SGLangAdmin
from genapi.providers.sglang.verdicts import answer_of
from genapi.providers.shapes.answers import unreadable
from genapi.providers.shapes.loads import LOAD_ROWS, WholeLoad
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

__all__ = ("ROWS", "SGLangFiles")

_BEFORE, _SENT = Reached.NOT_BEGUN, Reached.SENT
_REPUBLISH = Recovery.REPUBLISH
_CLOSE = Recovery.CLOSE_THEN_REPUBLISH
_RESTART = Recovery.RESTART_THEN_PUBLISH

ROWS: tuple[Row, ...] = (
    *FILE_RULES,
    row(
        Op.HEAL,
        Observed.REJECTED,
        _BEFORE,
        Outcome.DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "READ weight_updater.py: finishing the weights of an open session failed half-way",
    ),
    row(
        Op.UPDATE,
        Observed.UNREADABLE,
        _SENT,
        Outcome.UNKNOWN,
        Evidence.REJECTED,
        _REPUBLISH,
        "RUN: refused before anything was touched; READ: with a draft model its target may have "
        "been loaded",
    ),
    row(
        Op.UPDATE,
        Observed.REJECTED,
        _SENT,
        Outcome.DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "READ weight_updater.py: it failed half-way and read the same files again",
    ),
    row(
        Op.UPDATE,
        Observed.LOST,
        _SENT,
        Outcome.UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RUN: it goes on loading, or goes down with what it cannot load; what is asked next comes "
        "after it",
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


class SGLangFiles(WholeLoad, SGLangAdmin):
    """The operations of one worker as flows, where it loads weights from files."""

    verdicts: Mapping[Seen, Verdict] = verdicts_of(ROWS)

    def check(self, plan: PausePlan, facts: WorkerFacts, *, backend: str) -> None:
        """Refuse a worker that cannot be published to; it needs no backend and no rank."""
        del backend
        self.check_server(plan, facts, receives="files")

    def update(self, update_info: Mapping[str, Any], *, attachment: object | None) -> Flow[Answer]:
        """Load the directory `weights_path`; answers when every replica has loaded it."""
        del attachment
        path: str = update_info["weights_path"]
        body: dict[str, Any] = {
            "model_path": path,
            "load_format": None,
            "abort_all_requests": False,
            "weight_version": None,
            "is_async": False,
            "torch_empty_cache": False,
            "keep_pause": True,
            "recapture_cuda_graph": False,
            "token_step": 0,
            "flush_cache": False,
            "manifest": None,
        }
        reply = yield from call(
            HTTPCall(
                method="POST",
                path="/update_weights_from_disk",
                body=json_body(body),
                grant="admin",
            )
        )
        return unreadable(answer_of(Op.UPDATE, reply), path)
