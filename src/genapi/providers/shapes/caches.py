"""What vLLM's engine can do about caches, whoever's routes lead to it.

The rule of this file: a plan that cannot be carried out is refused with what can be done instead.
`clear_cache=true` drops the prefix cache and makes frozen requests recompute, both together;
`clear_cache=false` keeps both; nothing separates them while requests are frozen
(`contracts/vllm.md` section 4, RUN 49c).
"""

from collections.abc import Mapping
from types import MappingProxyType

from genapi.errors import UnsupportedError
from genapi.publication.plan import InFlightKV, PausePlan, PrefixCache

__all__ = ("CACHES", "clears")

CACHES: Mapping[tuple[bool, InFlightKV, PrefixCache], bool | str] = MappingProxyType(
    {
        # (requests are frozen, in_flight_kv, prefix_cache): clear_cache, or why it cannot be
        (True, "recompute", "flush"): True,
        (True, "recompute", "salt"): True,
        (True, "recompute", "stale"): (
            "vLLM cannot let frozen requests recompute and keep its prefix cache: use "
            "prefix_cache='flush' or 'salt', or in_flight_kv='stale'"
        ),
        (True, "stale", "flush"): (
            "vLLM cannot flush its prefix cache while frozen requests hold blocks of it: use "
            "prefix_cache='salt', or in_flight_kv='recompute'"
        ),
        (True, "stale", "salt"): False,
        (True, "stale", "stale"): False,
        (False, "recompute", "flush"): True,
        # Requests queued before the new salt was known would find entries under the old one.
        (False, "recompute", "salt"): True,
        (False, "recompute", "stale"): False,
    }
)


def clears(plan: PausePlan) -> bool:
    """Whether the engine is told to clear its caches.

    Raises:
        UnsupportedError: it cannot do what the plan says.
    """
    row = CACHES[plan.mode == "keep", plan.in_flight_kv, plan.prefix_cache]
    if isinstance(row, str):
        raise UnsupportedError(row)
    return row
