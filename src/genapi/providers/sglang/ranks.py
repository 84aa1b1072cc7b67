"""The receiver's model: which rank each SGLang process takes in a collective.

The rule of this file: this is SGLang's own formula (READ weight_updater.py), kept apart from
whoever plans offsets, so that every plan can be checked against it.
"""

__all__ = ("receiver_rank", "server_ranks")


def receiver_rank(rank_offset: int, *, tp_rank: int) -> int:
    """The rank of one process; pipeline stages and replicas do not enter it.

    Args:
        rank_offset: as sent to `/init_weights_update_group`; it skips the trainer already.
        tp_rank: the process's place in its tensor-parallel group, which counts attention
            data-parallel ranks as well.
    """
    return rank_offset + tp_rank


def server_ranks(rank_offset: int, *, tp_size: int, pp_size: int = 1) -> list[int]:
    """The ranks of all processes of one server; with pipeline stages several share one.

    Args:
        rank_offset: as sent to it.
        tp_size: its `--tp-size`.
        pp_size: its `--pp-size`.
    """
    return [
        receiver_rank(rank_offset, tp_rank=tp_rank)
        for _ in range(pp_size)
        for tp_rank in range(tp_size)
    ]
