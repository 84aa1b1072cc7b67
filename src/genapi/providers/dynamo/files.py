"""Dynamo's workers of vLLM told to load weights from a directory.

The rule of this file: one call loads everything, or fails and leaves the model in pieces; nothing
is joined, begun or finished. The label is a call of its own, after the load was answered: a load
that brings it declares it also where nobody waits for the answer any more. RUN was seen on Dynamo
1.6.1 with its Python worker of vLLM 0.31.0 (`tests/engines/test_filesystem.py`).

The Python worker loads by `update_weights_from_disk`, which it refuses unless it is paused. The
sidecar has no such route: its engine loads by the collective RPC of its own server, where it has
one (READ; driven on the embedded engine). SGLang behind a worker has a route, and is not told:
whether anything that it is asked after a load whose answer was lost comes after that load was never
seen, and so not when a directory is no longer read.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from genapi.errors import UnsupportedError
from genapi.providers.base import Admin, WorkerFacts
from genapi.providers.dynamo.admin import (
    CollectiveWorker,
    DynamoWorker,
    PythonWorker,
    family_in,
)
from genapi.providers.dynamo.routes import LOAD, Family, no_files
from genapi.providers.dynamo.verdicts import answer_of
from genapi.providers.shapes.answers import unreadable
from genapi.providers.shapes.loads import LOAD_ROWS, VLLM_ROWS, WholeLoad
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

__all__ = ("ROWS", "files_of")

_SENT = Reached.SENT
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
        "RUN: a tensor of another shape is replayed; resumed it says ok and serves neither version",
    ),
    row(
        Op.UPDATE,
        Observed.LOST,
        _SENT,
        Outcome.UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RUN: it goes on loading; what is asked of its engine next comes after it",
    ),
    *LOAD_ROWS,
)

_VERDICTS: Mapping[Seen, Verdict] = verdicts_of(ROWS)


def files_of(facts: WorkerFacts | None) -> Admin:
    """The administration of a worker that loads files; of an unread one, the Python worker's.

    Raises:
        UnsupportedError: workers of its family cannot be told to.
    """
    family = family_in(facts)
    server = None if facts is None else facts.details.get("server")
    match family:
        case Family.VLLM:
            return _PythonFiles(can_leave=False)
        case Family.SIDECAR | Family.COLLECTIVE if server is not None:
            return _CollectiveFiles(server)
        case _:
            who = "a worker" if facts is None else facts.id
            reason = no_files(family, (), has_server=False)
            raise UnsupportedError(f"{who} cannot be told to load files: {reason}")


class _Files(WholeLoad, DynamoWorker):
    """What all families do alike, where they load weights from files."""

    verdicts = _VERDICTS

    def check(self, plan: PausePlan, facts: WorkerFacts, *, backend: str) -> None:
        """Refuse a worker that cannot be told to load; it needs no backend."""
        del backend
        self.check_server(plan, facts, receives="files")

    def update(self, update_info: Mapping[str, Any], *, attachment: object | None) -> Flow[Answer]:
        """Load the directory `weights_path`; answers when every rank has loaded it."""
        del attachment
        path: str = update_info["weights_path"]
        return unreadable((yield from self._load(path)), path)

    @abstractmethod
    def _load(self, path: str) -> Flow[Answer]: ...


class _PythonFiles(_Files, PythonWorker):
    """Dynamo's Python worker of vLLM."""

    def _load(self, path: str) -> Flow[Answer]:
        body = {"model_path": path, "engine_rpc": "reload_weights"}
        reply = yield from call(
            HTTPCall(method="POST", path=f"/engine/{LOAD}", body=json_body(body))
        )
        return answer_of(Op.UPDATE, reply)


class _CollectiveFiles(_Files, CollectiveWorker):
    """A sidecar whose engine's own server has a collective RPC (READ)."""

    def _load(self, path: str) -> Flow[Answer]:
        return self.rpc(Op.UPDATE, "reload_weights", weights_path=path, is_checkpoint_format=True)
