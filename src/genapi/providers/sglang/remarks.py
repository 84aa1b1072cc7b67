"""What a reply of SGLang lacks though it was asked for, or says that a user has to know.

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

_LEAST_TEMPERATURE = 1e-6
"""SGLang takes a smaller temperature above 0 for greedy (READ sampling_params.py)."""


def remark_on(reply: GenerateResponse, request: GenerateRequest, *, remark: Remark) -> None:
    """Compare a reply with its request.

    Args:
        reply: what came.
        request: what was asked.
        remark: told each finding.
    """
    sampling = request.sampling
    on_counts(reply, remark)
    on_echo(reply, remark)
    if sampling.prompt_logprobs is not None:
        on_prompt_scores(reply, remark)
    if sampling.logprobs is not None:
        _on_mode(reply, request, remark)
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        remark(f"SGLang takes temperature {sampling.temperature} for greedy")
    on_min_tokens(reply, sampling, remark)


def _on_mode(reply: GenerateResponse, request: GenerateRequest, remark: Remark) -> None:
    sampling = request.sampling
    remedy = "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
    on_raw_scores(reply, sampling, remark, remedy=remedy)
    # Greedy draws have one candidate: what would be left of it says nothing.
    truncates = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if reply.logprobs_mode == "scaled" and truncates and sampling.temperature > 0:
        remark(
            "the server scores before top_k, top_p and min_p truncate: the logprobs are not those "
            "of the draw; sample without truncation, or read output_token_sampling_logprobs in "
            "output.extra with Options(body={'return_sampling_mask': True})"
        )
