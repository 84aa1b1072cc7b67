"""How a trainer reaches the receivers of weights that an engine has of its own.

The rule of this file: it says what an engine's receivers expect of a sender, for a transport to
follow; the routes that have them receive are the provider's.
"""

from dataclasses import dataclass

__all__ = ("Receivers",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """An engine's own end of a transfer group, which knows broadcasts of data and nothing else.

    A bucket is one broadcast for each tensor, or a single one of all their bytes in the order of
    the update call, where each tensor begins at a multiple of the size of its elements.

    Attributes:
        store_prefixes: what the receivers put before the keys of the rendezvous, the outermost
            first; before the key itself comes the device.
    """

    store_prefixes: tuple[str, ...]
