"""The capability matrix: the manifest and the profiles as a page's table."""

from collections.abc import Sequence

from genapi.errors import UnsupportedError
from genapi.providers import registry

from .manifest import MANIFEST
from .stand import Profile

__all__ = ("capabilities",)

_AREAS = {
    "ready": "Discovery",
    "generate": "Requests",
    "stream": "Streams",
    "abort": "Aborts",
    "fault": "Failures of a call",
    "version": "Versions",
    "publish": "Publications",
}


def capabilities(profiles: Sequence[Profile]) -> str:
    """What each provider shows, by area, and what it does not, with the reason."""
    names = [profile.provider for profile in profiles]
    parts = ["## How they differ by what they say of themselves", _facts(profiles)]
    head = ["behaviour", "what is true", *names, "shown on"]
    for area, title in _AREAS.items():
        rows = [behaviour for behaviour in MANIFEST if behaviour.id.startswith(f"{area}:")]
        cells = [
            [
                f"`{row.id}`",
                row.sentence,
                *("no" if row.id in profile.excluded else "yes" for profile in profiles),
                ", ".join(name for name in ("memory", "socket", "real") if row.runs_on(name)),
            ]
            for row in rows
        ]
        parts += [f"## {title}", _table([head, *cells])]
    reasons = [
        [f"`{name}`", profile.provider, reason]
        for profile in profiles
        for name, reason in profile.excluded.items()
    ]
    parts += [
        "## What a provider does not have",
        _table([["behaviour", "provider", "why"], *reasons]),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(profiles: Sequence[Profile]) -> str:
    """What is data in a provider, and not a behaviour."""
    admins = [registry.provider(profile.provider).administer(None) for profile in profiles]
    rows = [
        ["", *(profile.provider for profile in profiles)],
        ["scores of a server with its defaults", *(p.logprobs_mode for p in profiles)],
        [
            "the label comes with the end of the session",
            *(_word(a.finish_sets_label) for a in admins),
        ],
        ["a label is written ahead of an update", *(_word(a.marks) for a in admins)],
        [
            "weights go to a receiver of the engine's own",
            *(_word(a.receivers is not None) for a in admins),
        ],
        ["weights are loaded from files", *(_word(_loads(p.provider)) for p in profiles)],
    ]
    return _table(rows)


def _loads(provider: str) -> bool:
    try:
        registry.provider(provider).administer(None, files=True)
    except UnsupportedError:
        return False
    return True


def _word(holds: bool) -> str:  # noqa: FBT001 - one value of a table
    return "yes" if holds else "no"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
