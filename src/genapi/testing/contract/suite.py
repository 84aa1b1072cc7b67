"""Which body runs for which provider on which carrier."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from . import discovery, failures, generation, publication, versions
from .bodies import BODIES
from .manifest import MANIFEST, Behaviour
from .stand import Carrier, Operation, Profile, Rig

__all__ = ("Case", "suite")

MODULES = (discovery, failures, generation, publication, versions)
"""Where the bodies are."""


@dataclass(frozen=True, slots=True)
class Case:
    """One behaviour of one provider on one carrier."""

    behaviour: Behaviour
    profile: Profile
    carrier: Carrier

    def __str__(self) -> str:
        return f"{self.profile.provider}-{self.carrier.name}-{self.behaviour.id}"

    async def run(self) -> None:
        """Show the behaviour, or fail."""
        await BODIES[self.behaviour.id](Rig(self.profile, self.carrier))


def suite(profiles: Iterable[Profile], carriers: Iterable[Carrier]) -> tuple[Case, ...]:
    """Every case of these providers on these carriers that nothing excludes.

    Raises:
        ValueError: a profile lacks a route, excludes a behaviour that there is not, or gives no
            reason.
    """
    brought = tuple(carriers)
    return tuple(case for profile in profiles for case in _cases(profile, brought))


def _cases(profile: Profile, carriers: tuple[Carrier, ...]) -> Iterator[Case]:
    unwanted = {"sleep"} if "publish:asleep" in profile.excluded else set()
    wanted = [name for name in get_args(Operation) if name not in unwanted]
    missing = [name for name in wanted if not profile.paths.get(name)]
    if missing:
        raise ValueError(f"{profile.provider}: paths lacks {', '.join(map(repr, missing))}")
    unknown = sorted(set(profile.excluded) - {behaviour.id for behaviour in MANIFEST})
    if unknown or not all(reason.strip() for reason in profile.excluded.values()):
        raise ValueError(
            f"{profile.provider}: excluded needs ids of behaviours, each with a reason; "
            f"not known: {unknown}"
        )
    for carrier in carriers:
        for behaviour in MANIFEST:
            if behaviour.id not in profile.excluded and behaviour.runs_on(carrier.name):
                yield Case(behaviour, profile, carrier)
