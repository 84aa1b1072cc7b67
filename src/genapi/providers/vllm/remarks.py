"""What a reply lacks though it was asked for, or says that a user has to know.

The rule of this file: a remark is a sentence for the caller, who warns, or raises when it is
strict. What cannot be seen in the reply is not remarked upon.
"""

from collections.abc import Callable

import numpy as np

from genapi.types.request import GenerateRequest
from genapi.types.response import FinishReason, GenerateResponse

__all__ = ("remark_on",)

Remark = Callable[[str], None]

_LEAST_TEMPERATURE = 0.01
"""vLLM raises a smaller temperature above 0 to this, with a log line only (READ)."""


def remark_on(
    reply: GenerateResponse, request: GenerateRequest, *, remark: Remark, echoed: bool
) -> None:
    """Compare a reply with its request.

    Args:
        reply: what came.
        request: what was asked.
        remark: told each finding.
        echoed: whether the server sent the prompt's ids back.
    """
    _on_counts(reply, remark)
    if not echoed:
        remark("the server did not echo the prompt's ids, so they cannot be compared")
    if request.sampling.prompt_logprobs is not None:
        _on_prompt_scores(reply, remark)
    if request.sampling.logprobs is not None:
        _on_mode(reply, request, remark)
    _on_options(reply, request, remark)


def _on_counts(reply: GenerateResponse, remark: Remark) -> None:
    tokens = sum(len(output.token_ids) for output in reply.outputs)
    holes = sum(output.missing_logprobs for output in reply.outputs)
    if holes:
        remark(f"{holes} of {tokens} tokens have no usable logprob (NaN)")
    if reply.usage.completion_tokens not in (None, tokens):
        remark(f"usage counts {reply.usage.completion_tokens} tokens, {tokens} arrived")


def _on_prompt_scores(reply: GenerateResponse, remark: Remark) -> None:
    if reply.prompt_logprobs is None:
        remark("prompt_logprobs were asked for and did not come")
        return
    holes = int(np.isnan(reply.prompt_logprobs[1:]).sum())
    if holes:
        remark(f"{holes} prompt tokens have no usable logprob (NaN)")


def _on_mode(reply: GenerateResponse, request: GenerateRequest, remark: Remark) -> None:
    sampling = request.sampling
    # At temperature 0 both modes give the same scores.
    if reply.logprobs_mode == "raw" and sampling.temperature not in (0.0, 1.0):
        remark(
            "the server gives raw logprobs (before temperature) and temperature is "
            f"{sampling.temperature}: they are not the log-probabilities of the draw; start "
            "vLLM with --logprobs-mode processed_logprobs, or sample at temperature 1"
        )
    truncates = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if reply.logprobs_mode == "processed" and truncates and sampling.temperature > 0:
        remark(
            "the server gives processed logprobs and top_k, top_p or min_p truncate: they are "
            "renormalised over the kept candidates, which a trainer has to truncate as well"
        )


def _on_options(reply: GenerateResponse, request: GenerateRequest, remark: Remark) -> None:
    sampling = request.sampling
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        remark(f"vLLM raises temperature {sampling.temperature} to {_LEAST_TEMPERATURE}")
    if request.lora is not None and reply.model not in (None, request.lora):
        remark(f"adapter {request.lora!r} was asked for, {reply.model!r} generated")
    for output in reply.outputs:
        count = len(output.token_ids)
        if output.finish_reason is FinishReason.STOP and count < sampling.min_tokens:
            remark(f"min_tokens is {sampling.min_tokens}, stopped after {count}")
