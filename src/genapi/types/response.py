"""What comes back: `GenerateResponse`, its outputs, and the events of a stream."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, model_validator

from genapi.types.base import Float32Array, FrozenDict, Value
from genapi.types.ids import TokenIds, WorkerId
from genapi.types.policy import PolicyTrace

__all__ = (
    "Attempt",
    "FinishReason",
    "Finished",
    "GenerateEvent",
    "GenerateOutput",
    "GenerateResponse",
    "LogprobsMode",
    "TokenChunk",
    "TopLogprobs",
    "Usage",
)

LogprobsMode = Literal["raw", "scaled", "processed"]
"""Of which distribution the scores are: before temperature and truncation; after temperature and
before truncation; after both."""


class FinishReason(StrEnum):
    """Why an output ended. A reason that genapi does not know is OTHER; `finish_raw` has it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TOOL_CALLS = "tool_calls"
    OTHER = "other"


class TopLogprobs(Value):
    """The best candidates at one position.

    Attributes:
        token_ids: candidate ids, in the engine's order.
        logprobs: their log-probabilities, float32, NaN = no usable value.
    """

    token_ids: TokenIds
    logprobs: Float32Array

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        if len(self.token_ids) != len(self.logprobs):
            message = f"{len(self.token_ids)} ids with {len(self.logprobs)} logprobs"
            raise ValueError(message)
        return self


class GenerateOutput(Value):
    """One output of a request.

    Attributes:
        index: which of the `n` outputs.
        token_ids: generated ids, stop token included.
        logprobs: float32 of shape (tokens,), read-only; NaN where the engine gave no usable
            value; None = not asked for.
        top_logprobs: per token the best candidates; None = not asked for.
        text: generated text where the route gives it, else None.
        reasoning: what the model thought before its answer, where the server tells it apart.
        tool_calls: calls of tools, as OpenAI's chat route names them: `id`, `type`, `function`
            with `name` and `arguments` (a JSON text). Whether there are any decides, not the
            finish reason.
        finish_reason: why it ended.
        finish_raw: the engine's own word for it.
        stop_reason: the stop text or stop id that matched, else None.
        policy: which policy made which token.
        extra: reply fields genapi has no name for.
    """

    index: int = 0
    token_ids: TokenIds
    logprobs: Float32Array | None = None
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    text: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[Annotated[Mapping[str, Any], AfterValidator(FrozenDict)], ...] = ()
    finish_reason: FinishReason
    finish_raw: str | None = None
    stop_reason: str | int | None = None
    policy: PolicyTrace
    extra: Annotated[Mapping[str, Any], AfterValidator(FrozenDict)] = FrozenDict()

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        count = len(self.token_ids)
        if self.logprobs is not None and len(self.logprobs) != count:
            message = f"{count} token ids with {len(self.logprobs)} logprobs"
            raise ValueError(message)
        if self.top_logprobs is not None and len(self.top_logprobs) != count:
            message = f"{count} token ids with {len(self.top_logprobs)} top_logprobs"
            raise ValueError(message)
        if len(self.policy) != count:
            message = f"{count} token ids with a policy trace of {len(self.policy)} tokens"
            raise ValueError(message)
        return self

    @property
    def is_complete(self) -> bool:
        """Whether the output ended by itself: not by an abort or an error."""
        return self.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR)

    @property
    def missing_logprobs(self) -> int:
        """How many tokens have no usable log-probability though they were asked for."""
        if self.logprobs is None:
            return 0
        return int((self.logprobs != self.logprobs).sum())


class Usage(Value):
    """Token counts as the engine reports them; None = not reported."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class Attempt(Value):
    """One sending of a request.

    Attributes:
        wire_id: the id this attempt had on the wire.
        worker: who got it; None = an opaque router.
        error: why it did not become the reply; None for the one that did.
    """

    wire_id: str
    worker: WorkerId | None = None
    error: str | None = None


class GenerateResponse(Value):
    """The reply to one request.

    Attributes:
        request_id: the user's label, or one that genapi made.
        outputs: the outputs, by index.
        prompt_token_ids: the prompt as the engine saw it; None where it does not say.
        prompt_logprobs: float32 of shape (prompt tokens,), the first NaN; None = not asked for.
        usage: token counts.
        attempts: every sending, the successful one last.
        worker: who generated; None where a router does not say.
        prefill_worker: who prefilled, under prefill/decode.
        logprobs_mode: `raw` (before temperature and truncation), `scaled` (after temperature,
            before truncation), `processed` (after both), or None = not known.
        model: the model's name in the reply.
        extra: reply fields genapi has no name for.
    """

    request_id: str
    outputs: tuple[GenerateOutput, ...]
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: Float32Array | None = None
    usage: Usage = Usage()
    attempts: tuple[Attempt, ...] = ()
    worker: WorkerId | None = None
    prefill_worker: WorkerId | None = None
    logprobs_mode: LogprobsMode | None = None
    model: str | None = None
    extra: Annotated[Mapping[str, Any], AfterValidator(FrozenDict)] = FrozenDict()

    @property
    def output(self) -> GenerateOutput:
        """The only output.

        Raises:
            ValueError: there is not exactly one; use `outputs`.
        """
        if len(self.outputs) != 1:
            message = f"the reply has {len(self.outputs)} outputs; use reply.outputs"
            raise ValueError(message)
        return self.outputs[0]


class TokenChunk(Value):
    """Tokens that arrived for one output.

    Attributes:
        index: which output.
        token_ids: the new ids only.
        logprobs: aligned with `token_ids`; None = not asked for.
    """

    index: int
    token_ids: TokenIds
    logprobs: Float32Array | None = None


class Finished(Value):
    """The last event of a stream: the whole reply, equal to what `generate` returns."""

    reply: GenerateResponse


GenerateEvent = TokenChunk | Finished
