"""What a reply lacks though it was asked for, or says that a user has to know.

The rule of this file: as in `shapes.remarks`, where is what holds for every engine.
"""

from genapi.providers.shapes.remarks import (
    Remark,
    on_counts,
    on_echo,
    on_min_tokens,
    on_prompt_scores,
    on_raw_scores,
)
from genapi.types.request import GenerateRequest
from genapi.types.response import GenerateResponse

__all__ = ("remark_on",)

_LEAST_TEMPERATURE = 0.01
"""vLLM raises a smaller temperature above 0 to this, with a log line only (READ)."""


def remark_on(reply: GenerateResponse, request: GenerateRequest, *, remark: Remark) -> None:
    """Compare a reply with its request.

    Args:
        reply: what came.
        request: what was asked.
        remark: told each finding.
    """
    on_counts(reply, remark)
    on_echo(reply, remark)
    if request.sampling.prompt_logprobs is not None:
        on_prompt_scores(reply, remark)
    if request.sampling.logprobs is not None:
        _on_mode(reply, request, remark)
    _on_options(reply, request, remark)


def _on_mode(reply: GenerateResponse, request: GenerateRequest, remark: Remark) -> None:
    sampling = request.sampling
    remedy = "start vLLM with --logprobs-mode processed_logprobs"
    on_raw_scores(reply, sampling, remark, remedy=remedy)
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
    on_min_tokens(reply, sampling, remark)
