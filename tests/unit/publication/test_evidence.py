"""What rows are, and how they are read and shown: none of it knows an engine."""

import pytest

from genapi.publication.evidence import (
    Observed,
    Op,
    Pattern,
    Reached,
    Row,
    Seen,
    Verdict,
    markdown,
    row,
    verdicts_of,
)
from genapi.types.worker import Evidence, Outcome, Recovery

UNTOUCHED = Verdict(Outcome.UNTOUCHED, Evidence.NOT_BEGUN, None)
UNKNOWN = Verdict(Outcome.UNKNOWN, Evidence.NO_ANSWER, Recovery.REPUBLISH)


def claims() -> tuple[Row, Row]:
    return (
        row(
            None,
            None,
            Reached.NOT_BEGUN,
            Outcome.UNTOUCHED,
            Evidence.NOT_BEGUN,
            None,
            "RULE: nothing was asked",
        ),
        row(
            Op.BEGIN,
            Observed.REFUSED,
            (Reached.EMPTY, Reached.SENT),
            Outcome.UNKNOWN,
            Evidence.NO_ANSWER,
            Recovery.REPUBLISH,
            "RUN: seen",
        ),
    )


def whatever_else() -> Row:
    return row(
        None,
        None,
        (Reached.EMPTY, Reached.SENT, Reached.HELD),
        Outcome.UNKNOWN,
        Evidence.NO_ANSWER,
        Recovery.REPUBLISH,
        "RULE: nothing was read",
    )


def test_a_row_written_as_a_line_has_a_column_for_everything() -> None:
    assert (
        Row(None, None, (Reached.NOT_BEGUN,), UNTOUCHED, "RULE: nothing was asked"),
        Row(Op.BEGIN, Observed.REFUSED, (Reached.EMPTY, Reached.SENT), UNKNOWN, "RUN: seen"),
    ) == claims()


def test_a_row_counts_at_every_place_that_it_names() -> None:
    assert verdicts_of([*claims(), whatever_else()]) == {
        Seen(None, None, Reached.NOT_BEGUN): UNTOUCHED,
        Seen(Op.BEGIN, Observed.REFUSED, Reached.EMPTY): UNKNOWN,
        Seen(Op.BEGIN, Observed.REFUSED, Reached.SENT): UNKNOWN,
        Seen(None, None, Reached.EMPTY): UNKNOWN,
        Seen(None, None, Reached.SENT): UNKNOWN,
        Seen(None, None, Reached.HELD): UNKNOWN,
    }


def test_two_rows_about_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match="two rows are about"):
        verdicts_of([*claims(), *claims(), whatever_else()])


def test_rows_must_say_what_follows_from_whatever_no_row_names() -> None:
    with pytest.raises(ValueError, match="whatever else is seen when empty was reached"):
        verdicts_of(claims())


def test_rows_and_patterns_are_shown_as_tables() -> None:
    patterns = [
        Pattern("no session", Observed.NO_SESSION, "READ: its source"),
        Pattern("gone", Observed.PEER_LOST, "RUN: seen", (Op.UPDATE, Op.FINISH)),
    ]
    rows, texts = markdown(claims(), patterns)
    assert rows.splitlines() == [
        "| asked | came back | reached | outcome | evidence | recovery | source |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| any | any other | not_begun | untouched | not_begun | none | RULE: nothing was asked |",
        "| begin | refused | empty, sent | unknown | no_answer | republish | RUN: seen |",
    ]
    assert texts.splitlines() == [
        "| text of the error | to | shows | source |",
        "| --- | --- | --- | --- |",
        "| `no session` | any | no_session | READ: its source |",
        "| `gone` | update, finish | peer_lost | RUN: seen |",
    ]
