"""Whether workers hold what they should: compared with each other and with the trainer.

The rule of this file: a worker is judged by what it answered, never by how often it was asked. A
comparison with nobody proves nothing, and is not counted as one.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import numpy as np

from genapi.errors import ConfigError
from genapi.publication.evidence import Answer, Observed, Op
from genapi.types.worker import VerifyLevel

__all__ = (
    "Checks",
    "Compared",
    "Found",
    "compare",
    "compare_checksums",
    "compare_scores",
    "found_of",
    "levels_of",
)

K = TypeVar("K", bound=Hashable)

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Checks:
    """How the workers of one publication are verified.

    Attributes:
        levels: in the order `label`, `checksum`, `probe`.
        tolerance: most nats between the scores of two workers.
        trainer: the trainer's own scores; None = not given.
        max_gap: most nats between a worker's score and the trainer's.
    """

    levels: tuple[VerifyLevel, ...] = ("label",)
    tolerance: float = 1e-3
    trainer: tuple[float, ...] | None = None
    max_gap: float = 0.1


@dataclass(frozen=True, slots=True)
class Compared:
    """One worker beside the others.

    Attributes:
        peers: how many others agree with it.
        gap: most nats between one of its scores and the trainer's; None = not compared.
        fault: why it cannot be trusted; None = nothing speaks against it.
    """

    peers: int = 0
    gap: float | None = None
    fault: str | None = None


def levels_of(verify: Sequence[str]) -> tuple[VerifyLevel, ...]:
    """The levels that a user asked for, `label` always among them, in their order.

    Raises:
        ConfigError: one is not known.
    """
    known: tuple[VerifyLevel, ...] = get_args(VerifyLevel)
    if not isinstance(verify, Iterable):
        raise ConfigError(f"verify={verify!r}: pass some of {', '.join(known)}, as ('label',)")
    asked = (verify,) if isinstance(verify, str) else tuple(verify)
    strangers = [level for level in asked if level not in known]
    if strangers:
        raise ConfigError(f"verify={verify!r}: {strangers[0]!r} is none of {', '.join(known)}")
    return tuple(level for level in known if level == "label" or level in asked)


def compare(op: Op, answers: Mapping[K, Answer], checks: Checks) -> dict[K, Answer]:
    """The answers to one operation, each with what the comparison shows of it.

    Facts become `peers` and `gap`; an answer that cannot be trusted becomes `DIFFERS`. Answers
    without facts to compare are left out.
    """
    compared: Mapping[K, Compared]
    if op is Op.READ:
        compared = compare_checksums(
            {k: (_text(a.facts.get("topology")), sums) for k, a, sums in _having(answers, _SUMS)}
        )
    elif op is Op.PROBE:
        compared = compare_scores({k: sums for k, _, sums in _having(answers, _SCORES)}, checks)
    else:
        return {}
    return {key: _told(answers[key], result) for key, result in compared.items()}


def compare_scores(scores: Mapping[K, Sequence[float]], checks: Checks) -> dict[K, Compared]:
    """Which workers score the fixed ids as the majority does, and as the trainer does.

    The majority is the largest number of workers that agree with one of them. Without one, nobody
    is believed, unless the trainer's numbers say who is nearest.
    """
    found: dict[K, Compared] = {}
    sound: dict[K, Sequence[float]] = {}
    for key, values in scores.items():
        gap = _gap(values, checks.trainer)
        if not all(map(math.isfinite, values)):
            found[key] = Compared(gap=gap, fault="its scores are not numbers")
        elif gap is not None and gap > checks.max_gap:
            found[key] = Compared(
                gap=gap,
                fault=f"its scores are up to {gap:.3g} nats from the trainer's, at most "
                f"{checks.max_gap:g} are allowed",
            )
        else:
            found[key] = Compared(gap=gap)
            sound[key] = values
    return found | _among(sound, found, checks)


def _among(
    sound: Mapping[K, Sequence[float]], found: Mapping[K, Compared], checks: Checks
) -> dict[K, Compared]:
    if not sound:
        return {}
    keys = list(sound)
    far = _distances([sound[key] for key in keys])
    peers = [sum(apart <= checks.tolerance for apart in row) for row in far]
    gaps = [found[key].gap or 0.0 for key in keys]
    best = max(range(len(keys)), key=lambda i: (peers[i], -gaps[i]))
    decided = 2 * peers[best] > len(keys) or checks.trainer is not None
    result: dict[K, Compared] = {}
    for i, key in enumerate(keys):
        compared = replace(found[key], peers=peers[i] - 1)
        if not decided:
            apart = max(max(row) for row in far)
            fault = f"workers disagree by up to {apart:.3g} nats, and no majority agrees"
            compared = replace(compared, fault=fault)
        elif far[best][i] > checks.tolerance:
            fault = (
                f"its scores are up to {far[best][i]:.3g} nats from those of most workers, at "
                f"most {checks.tolerance:g} are allowed"
            )
            compared = replace(compared, fault=fault)
        result[key] = compared
    return result


def _distances(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of each pair of rows the largest difference of two of their values."""
    table = np.array(rows, dtype=np.float64)
    return [np.abs(table - row).max(axis=1, initial=0.0).tolist() for row in table]


def compare_checksums(
    sums: Mapping[K, tuple[str, Mapping[str, str]]],
) -> dict[K, Compared]:
    """Which workers hold the same bytes as most others of their topology.

    Args:
        sums: of each worker its topology, and a digest of every parameter.
    """
    groups: dict[str, list[K]] = defaultdict(list)
    for key, (topology, _) in sums.items():
        groups[topology].append(key)
    found: dict[K, Compared] = {}
    for keys in groups.values():
        held = {key: tuple(sorted(sums[key][1].items())) for key in keys}
        holders = Counter(held.values())
        (usual, count), *_ = holders.most_common(1)
        decided = 2 * count > len(keys)
        for key in keys:
            same = holders[held[key]] - 1
            fault = None
            if not decided:
                fault = "workers hold different bytes, and no majority agrees"
            elif held[key] != usual:
                fault = f"it holds other bytes than most workers in {_names(held[key], usual)}"
            found[key] = Compared(peers=same, fault=fault)
    return found


def _names(one: tuple[tuple[str, str], ...], other: tuple[tuple[str, str], ...]) -> str:
    names = sorted({name for name, _ in set(one) ^ set(other)})
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@dataclass(frozen=True, slots=True)
class Found:
    """What the verification of one worker showed.

    Attributes:
        levels: at which it was proved to hold what it should. A comparison with nobody, neither
            another worker nor the trainer, proves nothing.
        blind: parameters of which its checksum saw nothing; None = none was taken.
        gap: most nats between one of its scores and the trainer's; None = not compared.
    """

    levels: tuple[VerifyLevel, ...] = ()
    blind: int | None = None
    gap: float | None = None


def found_of(label: str, answers: Mapping[Op, Answer], checks: Checks) -> Found:
    """What a worker's answers show of it.

    Args:
        label: of the attempt.
        answers: after the comparison.
        checks: how it was to be verified.
    """
    read = answers.get(Op.READ, _NO_ANSWER)
    probe = answers.get(Op.PROBE, _NO_ANSWER)
    blind, gap = read.facts.get("blind"), probe.facts.get("gap")
    proved: Mapping[VerifyLevel, bool] = {
        "label": read.facts.get("label") == label,
        "checksum": read.done and bool(read.facts.get("peers")),
        "probe": probe.done and (bool(probe.facts.get("peers")) or gap is not None),
    }
    return Found(
        tuple(level for level in checks.levels if proved[level]),
        blind if isinstance(blind, int) else None,
        gap if isinstance(gap, float) else None,
    )


def _gap(values: Sequence[float], trainer: Sequence[float] | None) -> float | None:
    if trainer is None:
        return None
    return max((abs(a - b) for a, b in zip(values, trainer, strict=True)), default=0.0)


_SUMS, _SCORES = "checksums", "scores"
_NO_ANSWER = Answer(Observed.LOST)


def _having(answers: Mapping[K, Answer], fact: str) -> list[tuple[K, Answer, Any]]:
    return [(key, a, a.facts[fact]) for key, a in answers.items() if a.done and fact in a.facts]


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _told(answer: Answer, compared: Compared) -> Answer:
    facts = {**answer.facts, "peers": compared.peers, "gap": compared.gap}
    if compared.fault is None:
        return replace(answer, facts=facts)
    return Answer(Observed.DIFFERS, compared.fault, facts)
