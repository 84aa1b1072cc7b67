"""Explores the publication table as far as time allows: `nox -s explore`."""

import sys

from tests.explore.rivals import Rivals
from tests.explore.search import HoleError, Search, Setting

ALL = 99
SETTINGS = (
    Setting(workers=1, faults=ALL, second_faults=ALL),
    Setting(workers=1, faults=ALL, second_faults=ALL, acknowledged=False),
    Setting(workers=1, faults=ALL, second_faults=ALL, finish_sets_label=False),
    Setting(workers=2, faults=1, second_faults=0, acknowledged=False),
    Setting(workers=2, faults=1, second_faults=0, finish_sets_label=False),
    Setting(workers=2, faults=1, second_faults=0, min_workers=1),
    *(
        Setting(workers=2, groups=2, faults=1, second_faults=0, min_workers=m, finish_sets_label=f)
        for m, f in ((None, True), (None, False), (1, True), (1, False))
    ),
    Setting(workers=3, groups=2, faults=1, second_faults=0, min_workers=1),
    Setting(workers=2, faults=2, second_faults=0),
    Setting(workers=2, faults=1, second_faults=1),
    Setting(workers=3, faults=1, second_faults=0),
    Setting(workers=3, faults=1, second_faults=0, min_workers=2),
)


def main() -> int:
    """Print what each search visits; 1 when an invariant does not hold."""
    try:
        for workers in (1, 2, 3):
            _say(f"two publishers, {workers} workers: {Rivals(workers).run()}")
        for setting in SETTINGS:
            _say(f"{setting}: {Search(setting).run()}")
    except HoleError as hole:
        _say(str(hole))
        return 1
    return 0


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - a program that prints what it finds


if __name__ == "__main__":
    sys.exit(main())
