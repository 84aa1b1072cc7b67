"""What observations prove whatever the engine does: rows that every provider's table begins with.

The rule of this file: a row here follows from how publications work. What an engine has to be
asked for is a row of its provider.
"""

from genapi.publication.evidence import Observed, Op, Reached, Row, row
from genapi.types.worker import Evidence, Outcome, Recovery

__all__ = ("RULES",)

_BEFORE, _EMPTY = Reached.NOT_BEGUN, Reached.EMPTY
_SENT, _HELD = Reached.SENT, Reached.HELD
_OPEN = (_EMPTY, _SENT)
_UNTOUCHED, _UNKNOWN = Outcome.UNTOUCHED, Outcome.UNKNOWN
_REPUBLISH = Recovery.REPUBLISH
_CLOSE = Recovery.CLOSE_THEN_REPUBLISH

RULES: tuple[Row, ...] = (
    row(
        None,
        None,
        _BEFORE,
        _UNTOUCHED,
        Evidence.NOT_BEGUN,
        None,
        "RULE: what was not asked to begin holds what it held",
    ),
    row(
        Op.PAUSE,
        None,
        _BEFORE,
        _UNTOUCHED,
        Evidence.NOT_BEGUN,
        _REPUBLISH,
        "RULE: it may be paused, and only a publication resumes it",
    ),
    row(
        Op.CONFIRM,
        None,
        _BEFORE,
        _UNTOUCHED,
        Evidence.NOT_BEGUN,
        _REPUBLISH,
        "RULE: nobody knows whether it stands still, whatever it answers a resume",
    ),
    row(
        Op.INSPECT,
        Observed.UPDATING,
        _BEFORE,
        _UNTOUCHED,
        Evidence.NOT_BEGUN,
        _CLOSE,
        "RULE: it is as whoever marked it left it, perhaps in the middle of a session",
    ),
    row(
        Op.HEAL,
        None,
        _BEFORE,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RULE: healing opens a session, which may be open still",
    ),
    row(
        Op.BEGIN,
        Observed.NOT_SENT,
        _EMPTY,
        _UNTOUCHED,
        Evidence.NOT_BEGUN,
        _REPUBLISH,
        "RULE: a call that was not sent began nothing",
    ),
    row(
        Op.BEGIN,
        Observed.REFUSED,
        _EMPTY,
        _UNKNOWN,
        Evidence.REJECTED,
        _CLOSE,
        "RULE: untouched needs more than a text that names no session",
    ),
    row(
        Op.UPDATE,
        Observed.NOT_SENT,
        _SENT,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RULE: earlier buckets may have arrived",
    ),
    row(
        Op.FINISH,
        Observed.NOT_SENT,
        _SENT,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RULE: the session is open still",
    ),
    row(
        None,
        None,
        _OPEN,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _CLOSE,
        "RULE: nothing was read back",
    ),
    row(
        None,
        None,
        _HELD,
        _UNKNOWN,
        Evidence.NO_ANSWER,
        _REPUBLISH,
        "RULE: its session is closed, and what it serves was not read",
    ),
    row(
        Op.INSPECT,
        Observed.NOT_SENT,
        _BEFORE,
        _UNTOUCHED,
        Evidence.NO_ANSWER,
        _REPUBLISH,
        "RULE: nothing listens there; the next publication reads it again, or has it restarted",
    ),
)
