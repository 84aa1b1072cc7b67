"""What observations prove whatever the engine does: rows that a provider's table begins with.

The rule of this file: a row here follows from how publications work. What an engine has to be
asked for is a row of its provider.
"""

from genapi.publication.evidence import Observed, Op, Reached, Row, row
from genapi.types.worker import Evidence, Outcome, Recovery

__all__ = ("FILE_RULES", "LABEL_RULES", "RULES")

_BEFORE, _EMPTY = Reached.NOT_BEGUN, Reached.EMPTY
_SENT, _HELD = Reached.SENT, Reached.HELD
_OPEN = (_EMPTY, _SENT)
_UNTOUCHED, _UNKNOWN = Outcome.UNTOUCHED, Outcome.UNKNOWN
_REPUBLISH = Recovery.REPUBLISH
_CLOSE = Recovery.CLOSE_THEN_REPUBLISH
_RESTART = Recovery.RESTART_THEN_PUBLISH

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
        Op.FINISH,
        Observed.REFUSED,
        _SENT,
        Outcome.DIRTY,
        Evidence.REJECTED,
        _CLOSE,
        "RULE: a refusal changes nothing: what it was sent is in, the session open still",
    ),
    row(
        Op.READ,
        Observed.OTHER_LABEL,
        _OPEN,
        _UNKNOWN,
        Evidence.OTHER_LABEL,
        _CLOSE,
        "RULE: FINISH may not have arrived, or not have ended; any label but the attempt's own, "
        "and none, proves nothing",
    ),
    row(
        Op.PROBE,
        Observed.OTHER_LABEL,
        _HELD,
        _UNKNOWN,
        Evidence.OTHER_LABEL,
        _REPUBLISH,
        "RULE: somebody labelled it, or another process came up at its address",
    ),
    row(
        None,
        Observed.DEAD,
        _BEFORE,
        _UNTOUCHED,
        Evidence.DEAD,
        _RESTART,
        "RULE: what is dead stays so; another process begins with other weights",
    ),
    row(
        None,
        Observed.DEAD,
        _OPEN,
        _UNKNOWN,
        Evidence.DEAD,
        _RESTART,
        "RULE: what is dead stays so; another process begins with other weights",
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

LABEL_RULES: tuple[Row, ...] = (
    *RULES,
    row(
        Op.LABEL,
        None,
        _OPEN,
        _UNKNOWN,
        Evidence.OTHER_LABEL,
        _REPUBLISH,
        "RULE: all is loaded and closed, and the label is not this attempt's",
    ),
)
"""The rules where a call of its own sets the label."""

FILE_RULES: tuple[Row, ...] = (
    *LABEL_RULES,
    row(
        Op.CLOSE,
        Observed.DONE,
        _EMPTY,
        _UNTOUCHED,
        Evidence.NOT_BEGUN,
        _REPUBLISH,
        "RULE: it was told to load nothing",
    ),
)
"""The rules where one call loads everything, and nothing is begun before it."""
