"""Greedy tokens held against `transformers`, on the weights and the context that a trace names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping, Sequence

    import genapi
    from tests.engines.conftest import Oracle

__all__ = ("FEW", "Judge")

TIE = 1e-4
"""Between the two best logits; where they are nearer, rounding decides which token comes."""
TIES_PER_TOKEN = 1 / 1000
FEW = 8
"""Ties that are to be expected of one long reply: its tokens rest on each other, and it repeats."""


class Judge:
    """Counts tokens, ties, and tokens that are not what their spans say."""

    def __init__(self, oracle: Oracle, folders: Mapping[int, pathlib.Path]) -> None:
        self.oracle = oracle
        self.folders = folders
        self.tokens = 0
        self.ties = 0

    def check(
        self, reply: genapi.GenerateResponse, prompt: Sequence[int], *, source: str = "engine"
    ) -> None:
        """Every token is what the weights that its span names make of everything before it.

        Where a span is an interval: what one of the weights in it makes, and nobody says what the
        token rests on.
        """
        assert reply.output.policy.source == source
        for span in reply.output.policy.spans:
            assert span.context == (span.lo if span.is_attested else None)
        assert self.mismatches(reply, prompt) == 0

    def mismatches(self, reply: genapi.GenerateResponse, prompt: Sequence[int]) -> int:
        """How many tokens are not what their span's weights make of everything before them."""
        out, wrong = reply.output, 0
        for span in out.policy.spans:
            assert span.lo is not None
            assert span.hi is not None
            before = (*prompt, *out.token_ids[: span.start])
            made = out.token_ids[span.start : span.end]
            said = [
                self.oracle(self.folders[step], before, made)
                for step in range(span.lo.step, span.hi.step + 1)
            ]
            for token, *choices in zip(made, *said, strict=True):
                self.tokens += 1
                tied = any(margin <= TIE for _, margin in choices)
                self.ties += tied
                wrong += not tied and token not in [best for best, _ in choices]
        return wrong

    def close(self, *, ties: int = 1) -> None:
        """Say what was compared, and fail where ties could have hidden anything.

        Args:
            ties: so many are to be expected of however few tokens.
        """
        print(f"\n{self.tokens} tokens compared with the reference, {self.ties} ties")
        assert self.tokens > 0
        assert self.ties <= max(ties, self.tokens * TIES_PER_TOKEN)
