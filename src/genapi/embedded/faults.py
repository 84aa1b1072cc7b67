"""Failures on order: which call to a worker goes wrong, and how.

Values and a counter; the worker acts on them. A fault hits one call, the `nth` one to its path.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import msgspec

__all__ = ("Action", "Fault", "FaultPlan", "parse_faults")

Action = Literal[
    "lose_reply",
    "refuse",
    "die_before",
    "die_during",
    "die_after",
    "never_answer",
    "answer_late",
    "garble",
    "error",
    "peer_lost",
]


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure.

    `lose_reply`: the call takes effect, the caller sees the connection reset. `refuse`: connection
    refused, no effect. `die_before`, `die_during`, `die_after`: the process is killed before the
    call has any effect, while it is under way, or when it has taken effect but before the reply is
    out. `never_answer`: no effect and no reply until the caller gives up. `answer_late`: the reply
    comes `delay_s` after its time. `garble`: the call takes effect, the reply is a 200 that is not
    JSON. `error`: `status` and `body` instead of any effect. `peer_lost`, on weight updates only:
    the sender is lost after `after_tensors` tensors of the call (half of them when None), of which
    an engine that loads what it has received in one go keeps none.
    """

    path: str
    action: Action
    nth: int = 1
    delay_s: float = 1.0
    status: int = 500
    body: str = (
        '{"error":{"message":"injected","type":"InternalServerError","param":null,"code":500}}'
    )
    after_tensors: int | None = None

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ValueError(
                f"unknown fault action {self.action!r}; known are {', '.join(get_args(Action))}"
            )
        if self.nth < 1:
            raise ValueError(f"nth counts calls from 1, got {self.nth}")


class FaultPlan:
    """Faults that are still to come; calls are counted per path from the start of the plan."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._faults = list(faults)
        self._calls: Counter[str] = Counter()

    def add(self, fault: Fault) -> None:
        """Plan one more; its `nth` counts from now on."""
        past = self._calls[fault.path]
        self._faults.append(replace(fault, nth=fault.nth + past))

    def take(self, path: str) -> Fault | None:
        """Count a call to `path` and return the fault that hits it, if any."""
        self._calls[path] += 1
        for fault in self._faults:
            if fault.path == path and fault.nth == self._calls[path]:
                self._faults.remove(fault)
                return fault
        return None


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Faults from a JSON list of objects with the fields of `Fault`.

    Raises:
        ValueError: The text is not that.
    """
    return msgspec.json.decode(text, type=tuple[Fault, ...])
