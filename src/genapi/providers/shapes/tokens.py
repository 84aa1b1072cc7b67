"""Tokens with their scores: lists as they were decoded go in, values come out.

The rule of this file: what is no score becomes NaN, and nothing else is changed.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from genapi.errors import ConfigError, ReplyError
from genapi.types.ids import MAX_ID, TokenIds
from genapi.types.response import TokenChunk, TopLogprobs
from genapi.wire.http import HTTPReply

__all__ = (
    "Id",
    "Piece",
    "Scores",
    "check_vocabulary",
    "compare_echo",
    "ids_in",
    "ids_of",
    "scores_of",
    "top_of",
)

Id = Annotated[int, Meta(ge=0, le=MAX_ID)]
"""A token id on the wire, as msgspec checks it."""
Scores = Sequence[float | None]

_HIGHEST = 0.01
"""Above 0 by rounding: half precision has a probability of 1 up to e^0.008, float32 e^1e-7."""


def ids_of(values: Sequence[int]) -> TokenIds:
    """Ids that were checked while they were decoded."""
    return TokenIds.of_array(np.array(values, dtype=np.int32))


def ids_in(reply: HTTPReply, name: str) -> TokenIds:
    """The ids that a server made of a prompt, field `name` of its answer.

    Raises:
        ReplyError: there are none.
    """
    found = reply.json_field(name)
    try:
        ids = TokenIds(found)
    except (TypeError, ValueError):
        ids = TokenIds()
    if not ids:
        raise ReplyError(f"{reply.url} answered no ids in {name!r}", body=reply.body, url=reply.url)
    return ids


def scores_of(values: Scores, *, hole: float | None = None) -> npt.NDArray[np.float32]:
    """The scores as float32; what is no score, or that of more than certainty, is NaN.

    Args:
        values: the scores, None where there is none.
        hole: a number that the engine writes in place of a score.
    """
    wide = np.array(values, dtype=np.float64)  # None becomes NaN
    if hole is not None:
        wide[wide == hole] = np.nan
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    narrow[np.isinf(narrow) | (narrow > _HIGHEST)] = np.nan
    narrow.flags.writeable = False
    return narrow


def top_of(
    counts: Sequence[int], ids: Sequence[int], scores: Scores, *, hole: float | None = None
) -> tuple[TopLogprobs, ...]:
    """The candidates at each position.

    Args:
        counts: how many candidates each position has.
        ids: those of all positions, one after the other.
        scores: theirs.
        hole: as in `scores_of`.
    """
    all_ids, all_scores = ids_of(ids), scores_of(scores, hole=hole)
    built = []
    end = 0
    for count in counts:
        start, end = end, end + count
        # Both are checked and of one length: built without validating each again.
        built.append(
            TopLogprobs.model_construct(
                token_ids=all_ids[start:end], logprobs=all_scores[start:end]
            )
        )
    return tuple(built)


class Piece:
    """New tokens of one output, as lists; `chunk` makes them a value."""

    __slots__ = ("_hole", "_ids", "_index", "_scores")

    def __init__(
        self,
        index: int,
        ids: Sequence[int],
        scores: Scores | None,
        *,
        hole: float | None = None,
    ) -> None:
        self._index = index
        self._ids = ids
        self._scores = scores
        self._hole = hole

    def __bool__(self) -> bool:
        return bool(self._ids)

    def chunk(self) -> TokenChunk:
        """The tokens as an event of a stream."""
        scores = None if self._scores is None else scores_of(self._scores, hole=self._hole)
        return TokenChunk(index=self._index, token_ids=ids_of(self._ids), logprobs=scores)


def compare_echo(sent: TokenIds, echo: Sequence[int]) -> None:
    """Hold the prompt that the server says it saw against the one that was sent.

    Raises:
        ReplyError: they differ.
    """
    ids = sent.tolist()
    if echo != ids:
        pairs = enumerate(zip(ids, echo, strict=False))
        first = next((f", first at position {i}" for i, (a, b) in pairs if a != b), "")
        raise ReplyError(
            f"prompt changed by server: {len(ids)} ids were sent, {len(echo)} came back{first}"
        )


def check_vocabulary(ids: Sequence[int], size: int | None) -> None:
    """Raise `ConfigError` for the first id beyond a vocabulary of `size` ids; None = not known."""
    if size is None:
        return
    values = np.asarray(TokenIds(ids))
    beyond = values >= size
    if beyond.any():
        position = int(np.argmax(beyond))
        raise ConfigError(
            f"prompt_token_ids[{position}] is {values[position]}; the server's vocabulary has "
            f"{size} ids: check that the tokenizer is the model's"
        )
