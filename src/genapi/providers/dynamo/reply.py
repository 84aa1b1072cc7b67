"""How bodies of the OpenAI routes become a `GenerateResponse`: unary and streamed alike.

The rule of this file: no version is read from a reply. Dynamo's workers put none into it, and what
a worker of somebody's own may put there is in `extra["engine_data"]`. Who served it is said by the
reply alone, pinned or not: what drops the names on the way drops the pins with them.

A request that the frontend moved to another worker while it ran names only one of them, and only
the last one's tokens in `engine_data`; its prompt counts the tokens of those before. Such a reply
is one of nobody in particular, which bounds its versions by all workers' (`extra["migrated"]`).
"""

from typing import Any, Final

import msgspec
from msgspec import Raw

from genapi.errors import ReplyError
from genapi.providers.base import DecodeContext
from genapi.providers.dynamo.frames import NvExt, WorkerIds, parse_engine_data, parse_nvext
from genapi.providers.dynamo.remarks import remark_on
from genapi.providers.shapes.choices import NULL, Output
from genapi.providers.shapes.openai import Body, Choice, OpenAIReply
from genapi.types.base import FrozenDict
from genapi.types.ids import WorkerId
from genapi.types.response import FinishReason, GenerateResponse

__all__ = ("Accumulator",)

_FINISH = {"eos": FinishReason.STOP, "cancelled": FinishReason.ABORT}
_LOST: Final = "some were lost, or changed places, between the worker and genapi"
_NO_SCORE: Final = -1e30
"""What workers write for a score that is not finite (READ vllm/handlers.py)."""


class _Output(Output):
    """The output, in whose end Dynamo has words of its own."""

    def reason(self) -> FinishReason:
        """The finish reason; ERROR while there is none."""
        return _FINISH.get(self.finish or "") or super().reason()


class Accumulator(OpenAIReply):
    """Takes in the bodies of one reply: a single one, or every chunk of a stream."""

    def __init__(self, context: DecodeContext) -> None:
        super().__init__(context, hole=_NO_SCORE)
        self._body: Body | None = None
        self._ext = NvExt()
        self._more: dict[str, Any] = {}
        self._workers = WorkerIds()
        self._last_ids: list[int] | None = None

    def new_output(self, index: int) -> Output:
        """An output that nothing came of yet."""
        return _Output(index, self.request, hole=self.hole)

    def ids_of(self, body: Body, choice: Choice) -> list[int] | None:
        """The new ids."""
        del choice
        return self._nvext(body).completion_token_ids

    def prompt_of(self, body: Body, choice: Choice) -> list[int] | None:
        """The prompt's ids."""
        del choice
        return self._nvext(body).prompt_token_ids

    def heed(self, body: Body) -> None:
        """Take in who served it, and what the worker itself says."""
        nvext = self._nvext(body)
        if nvext.worker_id is not None:
            self._workers = nvext.worker_id
        self.prompt_scores(nvext.prompt_logprobs)
        for output in self.outputs.values():
            if nvext.stop_reason is not None:
                output.stop_reason = nvext.stop_reason
            if nvext.timing is not None:
                output.extra["timing"] = nvext.timing
            if nvext.engine_data != NULL:
                self._take_engine_data(output, nvext.engine_data)
            for name, value in self._more.items():
                output.keep(name, value)

    def remark(self, response: GenerateResponse) -> None:
        """Say what the reply lacks."""
        remark_on(response, self.request, migrated=self._is_migrated(), remark=self.context.remark)

    def response(self) -> GenerateResponse:
        """The whole reply. Remarks go to the context.

        Raises:
            ReplyError: the worker made, or the frontend counted, other tokens than arrived.
        """
        for output in self.outputs.values():
            self._compare_made(output)
        return self._named(super().response())

    def partial(self) -> GenerateResponse:
        """What has arrived; an output without a finish reason ends in ERROR."""
        return self._named(super().partial())

    def _nvext(self, body: Body) -> NvExt:
        """Dynamo's part of a body, decoded once."""
        if body is not self._body:
            self._ext, self._more = parse_nvext(body.nvext)
            self._body = body
        return self._ext

    def _take_engine_data(self, output: Output, raw: Raw) -> None:
        try:
            self._last_ids, output.extra["engine_data"] = parse_engine_data(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ReplyError(f"nvext.engine_data breaks its contract: {error}") from None

    def _compare_made(self, output: Output) -> None:
        """Hold what arrived against what the worker and the frontend say of it at the end.

        The frontend counts the very lists that it hands on, and a worker lists what it made itself:
        all of it, or the end of what another had begun.
        """
        arrived, made = len(output.ids), self._last_ids
        if made is not None and output.ids[max(arrived - len(made), 0) :] != made:
            raise ReplyError(
                f"choice {output.index} has {arrived} tokens, which do not end in the {len(made)} "
                f"that the worker made: {_LOST}"
            )
        counted = self.usage.completion_tokens
        if counted is not None and counted != arrived:
            raise ReplyError(
                f"choice {output.index} has {arrived} tokens, and usage counts {counted}: {_LOST}"
            )

    def _is_migrated(self) -> bool:
        """Whether one worker went on with what another had begun."""
        counted = self.usage.prompt_tokens
        if counted is not None and self.prompt is not None and counted > len(self.prompt):
            return True
        last = self._last_ids
        return last is not None and any(len(last) < len(o.ids) for o in self.outputs.values())

    def _named(self, reply: GenerateResponse) -> GenerateResponse:
        """The reply with who served it; one that moved names nobody."""
        decode, prefill = self._workers.decode_worker_id, self._workers.prefill_worker_id
        migrated = self._is_migrated()
        # Whoever does both is named twice: of a single name nobody knows whether it was alone.
        named = not migrated and decode is not None and prefill is not None
        worker = _worker(decode) if named else None
        extra = {
            name: rank
            for name in ("prefill_dp_rank", "decode_dp_rank")
            if (rank := getattr(self._workers, name)) is not None
        }
        more = extra | ({"migrated": True} if migrated else {})
        return reply.model_copy(
            update={
                "worker": worker,
                "prefill_worker": _worker(prefill) if named and prefill != decode else None,
                "attempts": tuple(a.model_copy(update={"worker": worker}) for a in reply.attempts),
                "outputs": tuple(
                    o.model_copy(update={"extra": FrozenDict({**o.extra, **more})}) if more else o
                    for o in reply.outputs
                ),
            }
        )


def _worker(instance: int | None) -> WorkerId | None:
    """A worker by its instance alone; the fleet knows the rest of its name."""
    return None if instance is None else WorkerId(provider="dynamo", instance=str(instance))
