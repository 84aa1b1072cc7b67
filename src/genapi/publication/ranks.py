"""Who is in which transfer group, and which rank each has in it: trainer first, then rank groups.

The rule of this file: the order is that of the servers as they are listed, so that the same
servers are divided and ranked in the same way again.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from genapi.types.ids import WorkerId

__all__ = ("RankPlan", "Ranked", "check_ranks", "divide", "plan_groups", "plan_ranks")


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


def plan_groups(
    servers: Iterable[Ranked], places: Mapping[WorkerId, Iterable[int]], *, at_most: int | None
) -> list[RankPlan]:
    """The checked plan of each transfer group of at most `at_most` of these servers.

    Raises:
        ValueError: there is none; see `divide`, `plan_ranks` and `check_ranks`.
    """
    plans = [plan_ranks(part) for part in divide(servers, at_most=at_most)]
    for plan in plans:
        check_ranks(plan, {worker: places[worker] for worker in plan.offsets})
    return plans


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


def divide(servers: Iterable[Ranked], *, at_most: int | None) -> list[list[Ranked]]:
    """The transfer groups of these servers, of `at_most` each; None = one group.

    Raises:
        ValueError: servers of one data-parallel group, which cannot be divided, are more.
    """
    units: dict[Hashable, list[Ranked]] = {}
    for server in servers:
        key: Hashable = server.worker if server.dp_group is None else server.dp_group
        units.setdefault(key, []).append(server)
    groups: list[list[Ranked]] = []
    for unit in units.values():
        if at_most is not None and len(unit) > at_most:
            message = (
                f"max_workers_per_group={at_most}: the {len(unit)} servers of data-parallel group "
                f"{unit[0].dp_group!r} cannot be divided; make it at least {len(unit)}"
            )
            raise ValueError(message)
        if groups and (at_most is None or len(groups[-1]) + len(unit) <= at_most):
            groups[-1] += unit
        else:
            groups.append(list(unit))
    return groups


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
