"""Where bodies register under the ids of the manifest."""

from collections.abc import Awaitable, Callable

from .manifest import MANIFEST
from .stand import Rig

__all__ = ("BODIES", "Body", "shows")

Body = Callable[[Rig], Awaitable[None]]
BODIES: dict[str, Body] = {}
_IDS = frozenset(behaviour.id for behaviour in MANIFEST)


def shows(behaviour: str) -> Callable[[Body], Body]:
    """Mark the body of a behaviour.

    Raises:
        ValueError: the manifest has no such id, or another body shows it.
    """
    if behaviour not in _IDS or behaviour in BODIES:
        raise ValueError(f"{behaviour!r} is no id of the manifest, or has a body already")

    def register(body: Body) -> Body:
        BODIES[behaviour] = body
        return body

    return register
