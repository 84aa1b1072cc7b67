"""Transfer groups that stand: which workers are in which, and the trainer's end of each.

The rule of this file: a group is of exactly these lives of these workers. It is built once, serves
publications for as long as nothing breaks in it, and then another is built in its place.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import anyio

from genapi.publication.ranks import RankPlan
from genapi.weights.base import Sender

__all__ = ("Group", "leave", "regroup")


@dataclass(slots=True, eq=False)
class Group:
    """One transfer group.

    Attributes:
        ranks: its workers, and who has which rank.
        sender: the trainer's end; None = it is not built.
    """

    ranks: RankPlan
    sender: Sender | None = None


async def regroup(old: Sequence[Group], plans: Iterable[RankPlan]) -> tuple[Group, ...]:
    """One group for each plan: the old one where there is one; the others are left."""
    groups = tuple(
        next((group for group in old if group.ranks == plan), None) or Group(plan) for plan in plans
    )
    await leave(group for group in old if group not in groups)
    return groups


async def leave(groups: Iterable[Group]) -> None:
    """Free what the trainer holds of these groups. Bounded; their workers leave by joining anew."""
    async with anyio.create_task_group() as tasks:
        for group in groups:
            sender, group.sender = group.sender, None
            if sender is not None:
                tasks.start_soon(sender.aclose)
