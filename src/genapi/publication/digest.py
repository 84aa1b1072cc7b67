"""What both ends of a transfer have to agree on, as one short text.

The rule of this file: whatever would make one end expect other bytes than the other sends goes into
a digest, and nothing that differs between two ends that agree.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

from genapi.publication.manifest import Described
from genapi.types.ids import WorkerId

__all__ = ("group_digest", "manifest_digest", "plan_digest")

_LENGTH = 16


def group_digest(
    backend: str, init_info: Mapping[str, object], offsets: Mapping[WorkerId, int]
) -> str:
    """Of one group: its workers, their ranks, its rendezvous and wire parameters.

    Args:
        backend: the receiving backend's name.
        init_info: what every worker is told to join.
        offsets: the first rank of each worker.
    """
    ranks = sorted((str(worker), offset) for worker, offset in offsets.items())
    return _digest([backend, init_info, ranks])


def plan_digest(group: str, manifest: Iterable[Described], ends: Sequence[int]) -> str:
    """Of one update within a group: `group`, a colon, and what is sent in which buckets.

    Args:
        group: the digest of the group.
        manifest: every tensor, in the order in which it is sent.
        ends: how many tensors have been sent after each bucket.
    """
    return f"{group}:{_digest([_tensors(manifest), list(ends)])}"


def manifest_digest(manifest: Iterable[Described]) -> str:
    """Of the tensors alone, in their order."""
    return _digest(_tensors(manifest))


def _tensors(manifest: Iterable[Described]) -> list[list[object]]:
    return [[meta.name, meta.dtype, list(meta.shape)] for meta in manifest]


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()[:_LENGTH]
