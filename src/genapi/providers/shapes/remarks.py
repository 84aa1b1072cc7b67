"""Remarks that fit any engine's reply: counts that differ, scores that are missing.

The rule of this file: a remark is a sentence for the caller, who warns, or raises when it is
strict. What cannot be seen in the reply is not remarked upon.
"""

from collections.abc import Callable

import numpy as np

from genapi.types.request import SamplingParams
from genapi.types.response import FinishReason, GenerateResponse

__all__ = ("Remark", "on_counts", "on_echo", "on_min_tokens", "on_prompt_scores", "on_raw_scores")

Remark = Callable[[str], None]


def on_counts(reply: GenerateResponse, remark: Remark) -> None:
    """Scores that are missing, and tokens that the engine counts differently."""
    tokens = sum(len(output.token_ids) for output in reply.outputs)
    holes = sum(output.missing_logprobs for output in reply.outputs)
    if holes:
        remark(f"{holes} of {tokens} tokens have no usable logprob (NaN)")
    if reply.usage.completion_tokens not in (None, tokens):
        remark(f"usage counts {reply.usage.completion_tokens} tokens, {tokens} arrived")


def on_echo(reply: GenerateResponse, remark: Remark) -> None:
    """A prompt that nobody sent back."""
    if reply.prompt_token_ids is None:
        remark("the server did not echo the prompt's ids, so they cannot be compared")


def on_prompt_scores(reply: GenerateResponse, remark: Remark) -> None:
    """Scores of the prompt that were asked for."""
    if reply.prompt_logprobs is None:
        remark("prompt_logprobs were asked for and did not come")
        return
    holes = int(np.isnan(reply.prompt_logprobs[1:]).sum())
    if holes:
        remark(f"{holes} prompt tokens have no usable logprob (NaN)")


def on_min_tokens(reply: GenerateResponse, sampling: SamplingParams, remark: Remark) -> None:
    """A stop that came too early."""
    for output in reply.outputs:
        count = len(output.token_ids)
        if output.finish_reason is FinishReason.STOP and count < sampling.min_tokens:
            remark(f"min_tokens is {sampling.min_tokens}, stopped after {count}")


def on_raw_scores(
    reply: GenerateResponse, sampling: SamplingParams, remark: Remark, *, remedy: str
) -> None:
    """Scores from before temperature; at 0 and 1 they are those of the draw all the same."""
    if reply.logprobs_mode == "raw" and sampling.temperature not in (0.0, 1.0):
        remark(
            "the server gives raw logprobs (before temperature) and temperature is "
            f"{sampling.temperature}: they are not the log-probabilities of the draw; {remedy}, or "
            "sample at temperature 1"
        )
