"""The receiver's model: which rank each process of a Dynamo worker takes in a collective.

The rule of this file: this is the formula of the engine in the worker (vLLM's, READ
nccl_common.py), kept apart from whoever plans offsets, so that every plan can be checked against
it. A worker has one replica: `--enable-rl` refuses more.
"""

__all__ = ("receiver_rank", "worker_ranks")


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
