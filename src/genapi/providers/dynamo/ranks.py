"""The receiver's model: which rank each process of a Dynamo worker takes, and when it gives up.

The rule of this file: this is the formula of the engine in the worker (vLLM's, READ
nccl_common.py), kept apart from whoever plans offsets, so that every plan can be checked against
it. A worker has one replica: `--enable-rl` refuses more.
"""

from typing import Final

__all__ = ("JOIN_ENDS_S", "JOIN_S", "receiver_rank", "worker_ranks")

JOIN_ENDS_S: Final = 30.0
"""A worker that has not joined a group by then ends its process.

Dynamo's default of `DYN_RL_INIT_WEIGHTS_TIMEOUT_S`. No route tells what a worker was started with,
so that workers of a launch get the same.
"""
JOIN_S: Final = JOIN_ENDS_S - 5.0
"""An engine is told to give up before, so that its process outlives a trainer that is not there."""


def receiver_rank(rank_offset: int, *, local_rank: int) -> int:
    """The rank of one process.

    Args:
        rank_offset: as sent to the worker; it skips the trainer already.
        local_rank: the process's place in the worker's engine.
    """
    return rank_offset + local_rank


def worker_ranks(rank_offset: int, *, world_size: int) -> list[int]:
    """The ranks of all processes of one worker.

    Args:
        rank_offset: as sent to it.
        world_size: tensor times pipeline parallel size, as discovery names it.
    """
    return [receiver_rank(rank_offset, local_rank=rank) for rank in range(world_size)]
