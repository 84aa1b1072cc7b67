"""How a publication treats requests in flight and caches: `PausePlan`."""

from dataclasses import dataclass
from typing import Literal, get_args

from genapi.errors import ConfigError
from genapi.types.arguments import one_of

__all__ = ("InFlightKV", "PauseMode", "PausePlan", "PrefixCache")

PauseMode = Literal["abort", "drain", "keep"]
InFlightKV = Literal["recompute", "stale"]
PrefixCache = Literal["flush", "salt", "stale"]


@dataclass(frozen=True, slots=True)
class PausePlan:
    """What happens to running requests and to cached keys and values.

    Attributes:
        mode: `abort` ends running requests, `drain` lets them finish, `keep` freezes them.
        in_flight_kv: under `keep`, whether frozen requests recompute their keys and values on
            the new weights or go on with the old ones.
        prefix_cache: `flush` empties it; `salt` keeps entries of one version from requests of
            another by a salt; `stale` lets new requests reuse old entries.

    Raises:
        ConfigError: an unknown value, or `in_flight_kv="stale"` without `mode="keep"`.
    """

    mode: PauseMode = "keep"
    in_flight_kv: InFlightKV = "recompute"
    prefix_cache: PrefixCache = "salt"

    def __post_init__(self) -> None:
        for name, kind in (
            ("mode", PauseMode),
            ("in_flight_kv", InFlightKV),
            ("prefix_cache", PrefixCache),
        ):
            one_of(name, getattr(self, name), get_args(kind))
        if self.in_flight_kv == "stale" and self.mode != "keep":
            message = (
                f"in_flight_kv='stale' needs mode='keep'; mode={self.mode!r} leaves no request "
                "in flight whose keys and values could be kept"
            )
            raise ConfigError(message)
