"""What a reply of Dynamo lacks though it was asked for, or says that a user has to know.

The rule of this file: as in `shapes.remarks`, where is what holds for every engine.
"""

from genapi.providers.shapes.remarks import (
    Remark,
    on_counts,
    on_echo,
    on_min_tokens,
    on_prompt_scores,
)
from genapi.types.request import GenerateRequest
from genapi.types.response import GenerateResponse

__all__ = ("remark_on",)


def remark_on(
    reply: GenerateResponse, request: GenerateRequest, *, migrated: bool, remark: Remark
) -> None:
    """Compare a reply with its request.

    Args:
        reply: what came.
        request: what was asked.
        migrated: whether several workers made it.
        remark: told each finding.
    """
    sampling = request.sampling
    on_counts(reply, remark)
    on_echo(reply, remark)
    if sampling.prompt_logprobs is not None:
        on_prompt_scores(reply, remark)
    if migrated:
        remark(
            "the frontend moved the request to another worker while it ran: nobody says which "
            "tokens are whose; start the frontend with --migration-limit 0"
        )
    on_min_tokens(reply, sampling, remark)
