"""Changes the publication table row by row, and lists the changes that nothing notices.

Mutation tools change what functions do; the table is data. A part of `nox -s mutation`. The quick
tests are asked first; what they pass is searched, unless `--quick` leaves that out.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from genapi.publication import transaction
from genapi.publication.evidence import Observed
from genapi.publication.table import TABLE, Phase, Row, Who
from tests.explore.rivals import Rivals
from tests.explore.search import HoleError, Search, Setting

LOST = frozenset({Observed.LOST})
SAME = {Who.ALL, Who.MARKABLE}
"""The same workers in every search: all of them write labels ahead."""
TESTS = ("tests/unit/publication/test_table.py", "tests/unit/publication/test_transaction.py")
SEARCHES = (
    Setting(workers=1, faults=2, second_faults=0),
    Setting(workers=1, faults=2, second_faults=0, acknowledged=False),
    Setting(workers=1, faults=2, second_faults=0, finish_sets_label=False),
    Setting(workers=1, faults=1, second_faults=0, join=False),
    Setting(workers=2, faults=1, second_faults=0),
    Setting(workers=2, faults=1, second_faults=0, min_workers=1),
    Setting(workers=2, groups=2, faults=1, second_faults=0),
    Setting(workers=2, groups=2, faults=1, second_faults=0, min_workers=1),
)


def changes(row: Row) -> Iterator[tuple[str, Row]]:
    """Every row that differs from this one in one thing."""
    if row.ask is not None:
        yield "asks nothing", replace(row, ask=None)
        for who in Who:
            if who is not row.who and {who, row.who} != SAME:
                yield f"asks {who}", replace(row, who=who)
    if row.act is not None:
        yield "does nothing itself", replace(row, act=None)
    yield "breaks otherwise", replace(row, breaks=not row.breaks)
    yield "is alone otherwise", replace(row, alone=not row.alone)
    yield "tolerates otherwise", replace(row, tolerates=LOST - row.tolerates)
    if row.then is not row.otherwise:
        yield "goes on whatever happens", replace(row, otherwise=row.then)
        yield "never goes on", replace(row, then=row.otherwise)
    for on_cancel in ("cut", "wait", "go_on"):
        if on_cancel != row.on_cancel:
            yield f"on_cancel={on_cancel}", replace(row, on_cancel=on_cancel)


def is_tested() -> bool:
    """Whether a quick test fails on the table as it is now."""
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-k", "not every_row")
    with contextlib.redirect_stdout(io.StringIO()):
        return pytest.main([*options, *TESTS]) != pytest.ExitCode.OK


def is_noticed() -> bool:
    """Whether a search finds a hole in the table as it is now."""
    try:
        for setting in SEARCHES:
            Search(setting).run()
        Rivals(2).run()
    except (HoleError, KeyError):
        return True
    return False


def main() -> None:
    """Print every change that nothing notices, and how many there were."""
    count, missed = 0, 0
    quick = "--quick" in sys.argv
    only = [Phase(name) for name in sys.argv[1:] if name != "--quick"] or list(TABLE)
    if is_tested():
        sys.exit("the tests fail on the table as it is")
    for phase in only:
        for what, row in changes(TABLE[phase]):
            vars(transaction)["TABLE"] = {**TABLE, phase: row}
            count += 1
            if not is_tested() and (quick or not is_noticed()):
                missed += 1
                print(f"not noticed: {phase} {what}", flush=True)  # noqa: T201 - a program
    print(f"{count} changes of rows, {missed} not noticed")  # noqa: T201 - a program


if __name__ == "__main__":
    main()
