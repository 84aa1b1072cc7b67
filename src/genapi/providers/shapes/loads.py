"""A worker told to load a directory in one call, which is the whole update.

The rule of this file: nothing is begun before the load, and nothing has to be closed after it.
"""

from genapi.publication.evidence import Answer, Observed
from genapi.wire.flow import Flow, nothing_to_ask

__all__ = ("WholeLoad",)


class WholeLoad:
    """What an administration has of `genapi.providers.base.Admin` where `update` is such a call."""

    finish_sets_label = False

    def begin(self) -> Flow[Answer]:
        """Nothing has to be opened."""
        return nothing_to_ask(Answer(Observed.DONE))

    def finish(self, label: str | None) -> Flow[Answer]:
        """Nothing has to be closed; the label is a call of its own."""
        del label
        return nothing_to_ask(Answer(Observed.DONE))

    def close(self) -> Flow[Answer]:
        """Nothing is open."""
        return nothing_to_ask(Answer(Observed.DONE))
