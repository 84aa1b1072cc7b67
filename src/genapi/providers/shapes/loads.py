"""A worker told to load a directory in one call, which is the whole update.

The rule of this file: nothing is begun before the load, and nothing has to be closed after it.
"""

from genapi.publication.evidence import Answer, Observed, Op, Reached, Row, row
from genapi.types.worker import Evidence, Outcome, Recovery
from genapi.wire.flow import Flow, nothing_to_ask

__all__ = ("LOAD_ROWS", "VLLM_ROWS", "WholeLoad")

_BEFORE, _SENT, _HELD = Reached.NOT_BEGUN, Reached.SENT, Reached.HELD
_REPUBLISH = Recovery.REPUBLISH
_CLOSE = Recovery.CLOSE_THEN_REPUBLISH
_RESTART = Recovery.RESTART_THEN_PUBLISH

LOAD_ROWS: tuple[Row, ...] = (
    row(
        Op.CLOSE,
        Observed.DONE,
        _SENT,
        Outcome.DIRTY,
        Evidence.OTHER_LABEL,
        _REPUBLISH,
        "RUN: it has loaded all, and was not labelled",
    ),
    row(
        Op.READ,
        None,
        _HELD,
        Outcome.COMMITTED,
        Evidence.OWN_LABEL,
        _REPUBLISH,
        "RUN: it is labelled after the load has answered; paused until it serves with the others",
    ),
    row(
        Op.PROBE,
        Observed.DONE,
        _HELD,
        Outcome.COMMITTED,
        Evidence.OWN_LABEL,
        None,
        "RUN: it serves exactly the new weights",
    ),
    row(
        Op.PROBE,
        Observed.DIFFERS,
        _HELD,
        Outcome.DIRTY,
        Evidence.OTHER_SCORES,
        _REPUBLISH,
        "RUN: the next load makes its scores right",
    ),
)
"""What each engine was seen to do, run on each in `tests/engines/test_filesystem.py`."""

VLLM_ROWS: tuple[Row, ...] = (
    row(
        Op.HEAL,
        Observed.REFUSED,
        _BEFORE,
        Outcome.UNKNOWN,
        Evidence.REJECTED,
        _RESTART,
        "RUN: without --weight-transfer-config nothing closes what a failed load left",
    ),
    row(
        Op.HEAL,
        Observed.REJECTED,
        _BEFORE,
        Outcome.DIRTY,
        Evidence.REJECTED,
        _RESTART,
        "RUN: finishing replays a tensor that was rejected earlier, and leaves a session open",
    ),
    row(
        Op.UPDATE,
        Observed.UNREADABLE,
        _SENT,
        Outcome.DIRTY,
        Evidence.REJECTED,
        _CLOSE,
        "RUN: the model is in pieces; start, EMPTY finish, load serves exactly the new weights",
    ),
)
"""What vLLM was seen to do, at its own server and behind Dynamo."""


class WholeLoad:
    """What an administration has of `genapi.providers.base.Admin` where `update` is such a call."""

    finish_sets_label = False

    def begin(self) -> Flow[Answer]:
        """Nothing has to be opened."""
        return nothing_to_ask(Answer(Observed.DONE))

    def finish(self, label: str | None) -> Flow[Answer]:
        """Nothing has to be closed; the label is a call of its own."""
        del label
        return nothing_to_ask(Answer(Observed.DONE))

    def close(self) -> Flow[Answer]:
        """Nothing is open."""
        return nothing_to_ask(Answer(Observed.DONE))
