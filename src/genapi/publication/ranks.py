"""Who has which rank in a transfer group: trainer first, then the rank groups in a stable order."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from genapi.types.ids import WorkerId

__all__ = ("RankPlan", "Ranked", "check_ranks", "plan_ranks")


@dataclass(frozen=True, slots=True)
class Ranked:
    """One server that brings ranks into a group.

    Attributes:
        worker: which life of which server.
        ranks: processes in its rank group (TP x PP x DP of the whole group).
        dp_group: servers with the same name are one external data-parallel group: they share one
            offset and their ranks count once. None = the server is a group of its own.
    """

    worker: WorkerId
    ranks: int
    dp_group: str | None = None


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Offsets of every server in one transfer group.

    Attributes:
        world_size: ranks in all, the trainer's included.
        offsets: first rank of each server's rank group; the trainer is rank 0.
    """

    world_size: int
    offsets: Mapping[WorkerId, int]


def check_ranks(plan: RankPlan, places: Mapping[WorkerId, Iterable[int]]) -> None:
    """Hold a plan against the ranks that the engines will take by their own formula.

    Args:
        plan: the plan.
        places: what each server's processes add to their offset.

    Raises:
        ValueError: the ranks are no permutation of 1..world_size-1.
    """
    taken = sorted(
        plan.offsets[worker] + place for worker, added in places.items() for place in added
    )
    if taken != list(range(1, plan.world_size)):
        raise ValueError(
            f"workers would take the ranks {taken} of a group of {plan.world_size}, in which the "
            "trainer is rank 0: every rank has to be taken once; list every server of a "
            "data-parallel group"
        )


def plan_ranks(servers: Iterable[Ranked]) -> RankPlan:
    """The plan for these servers, in the order given.

    Raises:
        ValueError: a size below 1, or two sizes named for one data-parallel group.
    """
    offsets: dict[WorkerId, int] = {}
    groups: dict[Hashable, tuple[int, int]] = {}
    following = 1
    for server in servers:
        if server.ranks < 1:
            message = f"{server.worker} brings {server.ranks} ranks; a server brings at least 1"
            raise ValueError(message)
        key: Hashable = server.worker if server.dp_group is None else server.dp_group
        offset, ranks = groups.setdefault(key, (following, server.ranks))
        if ranks != server.ranks:
            message = (
                f"servers of data-parallel group {server.dp_group!r} name different sizes: "
                f"{ranks} and {server.ranks}"
            )
            raise ValueError(message)
        if offset == following:
            following += ranks
        offsets[server.worker] = offset
    return RankPlan(following, offsets)
