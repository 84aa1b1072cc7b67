"""Versions of tokens, and requests that ask for one."""

import anyio
import pytest

import genapi

from .bodies import shows
from .generation import CHAT
from .stand import Rig

__all__ = ()


def steps(trace: genapi.PolicyTrace) -> list[tuple[int | None, int | None]]:
    """The steps of each span's interval."""
    return [(s.lo.step if s.lo else None, s.hi.step if s.hi else None) for s in trace.spans]


@shows("version:unknown")
async def _unknown(rig: Rig) -> None:
    async with rig.stand() as s:
        trace = (await s.fleet.generate(s.request())).output.policy
        assert len(trace) == 8
        assert trace.oldest is None
        assert trace.newest is None
        assert trace.lag(0) is None


@shows("version:chat")
async def _chat(rig: Rig) -> None:
    async with rig.stand() as s:
        await s.publisher().adopt(7)
        for bound in ({}, {"min_version": 7}):
            asked = s.request(prompt_token_ids=None, messages=CHAT, **bound)
            for reply in (await s.fleet.generate(asked), await s.streamed(asked)):
                assert steps(reply.output.policy) == [(7, 7)]


@shows("version:held")
async def _held(rig: Rig) -> None:
    async with rig.stand(2) as s:
        report = await s.publisher().adopt(7)
        for bound in (
            {"min_version": 6},
            {"min_version": 7},
            {"exact_version": 7},
            {"min_version": report.version, "exact_version": report.version},
        ):
            reply = await s.fleet.generate(s.request(**bound))
            assert steps(reply.output.policy) == [(7, 7)]
            assert len(reply.attempts) == 1


@shows("version:awaited")
async def _awaited(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p:
        await p.adopt(7)
        replies: list[genapi.GenerateResponse] = []

        async def ask(bound: str) -> None:
            replies.append(await s.fleet.generate(s.request(**{bound: 8})))

        async with anyio.create_task_group() as group:
            for bound in ("min_version", "exact_version"):
                group.start_soon(ask, bound)
            await s.fleet.generate(s.request())
            assert s.sent("generate") == 1
            await p.publish(8, s.weights(1))
        assert len(replies) == 2
        for reply in replies:
            assert steps(reply.output.policy) == [(8, 8)]
            s.check(1, reply)


@shows("version:late")
async def _late(rig: Rig) -> None:
    async with rig.stand(2) as s:
        await s.publisher().adopt(7)
        with anyio.fail_after(5), pytest.raises(genapi.StalePolicyError) as caught:
            await s.fleet.generate(s.request(min_version=8, timeout_s=0.05))
        for part in ("min_version=8", "timeout_s=0.05", s.servers.addresses[0], ":7:1'"):
            assert part in str(caught.value)


@shows("version:passed")
async def _passed(rig: Rig) -> None:
    async with rig.stand() as s, s.publisher() as p:
        await p.adopt(7)
        await p.publish(8, s.weights(1))
        with anyio.fail_after(5), pytest.raises(genapi.StalePolicyError, match="any more"):
            await s.fleet.generate(s.request(exact_version=7))


@shows("version:elsewhere")
async def _elsewhere(rig: Rig) -> None:
    async with rig.stand(2) as s, s.publisher() as p, s.another() as other:
        await p.adopt(7)
        await other.snapshot()
        assert steps((await other.generate(s.request())).output.policy) == [(7, 7)]
        await p.publish(8, s.weights(1))
        await other.snapshot()
        reply = await other.generate(s.request())
        assert steps(reply.output.policy) == [(8, 8)]
        s.check(1, reply)
