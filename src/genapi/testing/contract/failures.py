"""What becomes of a request when a call or a worker fails."""

import anyio
import pytest

import genapi
from genapi import RetryPolicy
from genapi.events import RequestEnded, RequestRetried

from .bodies import shows
from .stand import Rig

__all__ = ()

_SOON = RetryPolicy(backoff_s=0.001, max_backoff_s=0.002)


@shows("fault:lost-reply")
async def _lost(rig: Rig) -> None:
    async with rig.stand(retry=_SOON) as s:
        s.fail(0, "generate", "lose_reply")
        reply = await s.fleet.generate(s.request())
        first, second = reply.attempts
        assert first.error is not None
        assert second.error is None
        assert first.wire_id != second.wire_id
        s.check(0, reply)


@shows("fault:may-have-run")
async def _may_have_run(rig: Rig) -> None:
    async with rig.stand(retry=RetryPolicy(retry_lost_replies=False)) as s:
        s.fail(0, "generate", "lose_reply")
        with pytest.raises(genapi.TransportError) as caught:
            await s.fleet.generate(s.request())
        assert caught.value.phase == "may_have_run"
        assert s.sent("generate") == 1


@shows("fault:unavailable")
async def _unavailable(rig: Rig) -> None:
    async with rig.stand(retry=_SOON) as s:
        s.fail(0, "generate", "error", nth=0, status=503)
        with pytest.raises((genapi.NotReadyError, genapi.OverloadedError)):
            await s.fleet.generate(s.request())
        assert s.sent("generate") == 3
        assert sum(isinstance(e, RequestRetried) for e in s.events) == 2


@shows("fault:garbled")
async def _garbled(rig: Rig) -> None:
    async with rig.stand() as s:
        s.fail(0, "generate", "garble")
        with pytest.raises(genapi.ReplyError) as caught:
            await s.fleet.generate(s.request())
        assert caught.value.body == b"<html>upstream"


@shows("fault:silent")
async def _silent(rig: Rig) -> None:
    async with rig.stand() as s:
        s.fail(0, "generate", "never_answer")
        with anyio.fail_after(5), pytest.raises(genapi.TransportError, match=r"timeout_s=0\.05"):
            await s.fleet.generate(s.request(timeout_s=0.05))
        (ended,) = [e for e in s.events if isinstance(e, RequestEnded)]
        assert ended.error is not None


@shows("fault:broken-stream")
async def _broken(rig: Rig) -> None:
    async with rig.stand() as s:
        s.fail(0, "generate", "break_off")
        ids: list[int] = []

        async def read() -> None:
            async with s.fleet.stream(s.request(tokens=200)) as events:
                async for event in events:
                    ids.extend(event.token_ids if isinstance(event, genapi.TokenChunk) else ())

        with anyio.fail_after(10), pytest.raises(genapi.IncompleteError) as caught:
            await read()
        partial = caught.value.partial
        assert isinstance(partial, genapi.GenerateResponse)
        assert 0 < len(ids) < 200
        assert partial.output.token_ids == ids
        assert not partial.output.is_complete


@shows("fault:dead-worker")
async def _dead(rig: Rig) -> None:
    async with rig.stand(2, retry=_SOON) as s:
        s.servers.kill(0)
        replies = [await s.fleet.generate(s.request(session=str(n))) for n in range(8)]
        alive = (await s.fleet.snapshot()).workers[1].id
        assert {reply.worker for reply in replies} == {alive}
        for reply in replies:
            s.check(0, reply)
