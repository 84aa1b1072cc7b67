"""What tests of several engines say about rows of their evidence tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from genapi.publication.evidence import Row, Seen

__all__ = ("assert_reached",)


def assert_reached(rows: Iterable[Row], reached: Collection[Seen]) -> None:
    """Fail unless the rows that claim to have been run, and none that was only read, are reached.

    A rule holds whatever the engine does, so it may be reached or not.
    """
    for row in rows:
        places = {Seen(row.op, row.observed, at) for at in row.reached}
        if not row.source.startswith("RULE"):
            assert row.source.startswith("RUN") == bool(places & set(reached)), row
