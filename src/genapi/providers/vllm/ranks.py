"""The receiver's model: which rank each vLLM worker process takes in a collective.

The rule of this file: this is vLLM's own formula (READ nccl_common.py; our gloo receiver follows
it), kept apart from whoever plans offsets, so that every plan can be checked against it.
"""

from collections.abc import Iterable

__all__ = ("receiver_rank", "server_ranks")


def receiver_rank(
    rank_offset: int, *, data_parallel_index: int = 0, replica_size: int = 1, local_rank: int = 0
) -> int:
    """The rank of one worker process.

    Args:
        rank_offset: as sent to `/init_weight_transfer_engine`; it skips the trainer already.
        data_parallel_index: which replica of the model, counted across all servers of a group.
        replica_size: tensor parallel times pipeline parallel size.
        local_rank: the process's place in its replica.
    """
    return rank_offset + data_parallel_index * replica_size + local_rank


def server_ranks(
    rank_offset: int, *, data_parallel_indexes: Iterable[int] = (0,), replica_size: int = 1
) -> list[int]:
    """The ranks of all worker processes of one server.

    Args:
        rank_offset: as sent to it.
        data_parallel_indexes: the replicas this server runs: all of them with internal data
            parallel, its own with external.
        replica_size: tensor parallel times pipeline parallel size.
    """
    return [
        receiver_rank(
            rank_offset,
            data_parallel_index=index,
            replica_size=replica_size,
            local_rank=local_rank,
        )
        for index in data_parallel_indexes
        for local_rank in range(replica_size)
    ]
