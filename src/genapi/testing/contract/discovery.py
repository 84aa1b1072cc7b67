"""Who answers, as what, and when a fleet is ready."""

import anyio
import pytest

import genapi
from genapi.types.config import Topology

from .bodies import shows
from .stand import Rig

__all__ = ()


@shows("ready:workers")
async def _workers(rig: Rig) -> None:
    async with rig.stand(2) as s:
        workers = (await s.fleet.snapshot()).workers
        assert len({str(worker.id) for worker in workers}) == 2
        for index, worker in enumerate(workers):
            assert worker.id.provider == rig.profile.provider
            assert worker.url == s.url(index)
            assert worker.role == "unified"
            assert worker.ranks == 1
            assert worker.healthy
            assert not worker.paused


@shows("ready:expected")
async def _expected(rig: Rig) -> None:
    async with rig.fleet(2, expect=Topology(workers=3)) as s:
        await s.fleet.snapshot()
        named = f"2 of 3 workers seen.*{s.servers.addresses[0]}"
        with anyio.fail_after(10), pytest.raises(genapi.FleetError, match=named):
            await s.fleet.wait_ready(timeout_s=0.5)
    async with rig.stand(2, expect=Topology(workers=2, world_size=2)) as s:
        assert len((await s.fleet.snapshot()).workers) == 2


@shows("ready:absent")
async def _absent(rig: Rig) -> None:
    async with rig.fleet(2) as s:
        first, second = s.servers.addresses
        s.fail(1, None, "refuse", nth=0)
        with anyio.fail_after(5), pytest.raises(genapi.FleetError) as caught:
            await s.fleet.wait_ready(timeout_s=1.0)
        assert second in str(caught.value)
        assert first not in str(caught.value)


@shows("ready:not-yet")
async def _not_yet(rig: Rig) -> None:
    async with rig.fleet() as s:
        for nth in (1, 2, 3):
            s.fail(0, "health", "error", nth=nth, status=503, body="")
        with anyio.fail_after(10):
            snapshot = await s.fleet.wait_ready(timeout_s=8)
        assert snapshot.workers[0].healthy
        assert s.sent("health") > 3


@shows("ready:stranger")
async def _stranger(rig: Rig) -> None:
    async with rig.fleet() as s:
        s.fail(0, None, "error", nth=0, status=404, body='{"detail":"Not Found"}')
        with anyio.fail_after(5), pytest.raises(genapi.ConfigError, match=s.servers.addresses[0]):
            await s.fleet.wait_ready(timeout_s=60)


@shows("ready:key")
async def _key(rig: Rig) -> None:
    flags = {"api_key": "secret"}
    async with rig.fleet(flags=flags) as s:
        with anyio.fail_after(5), pytest.raises(genapi.AuthError):
            await s.fleet.wait_ready(timeout_s=60)
    async with rig.stand(flags=flags, api_key="secret", admin_api_key="secret") as s:
        assert (await s.fleet.generate(s.request())).output.is_complete


@shows("ready:life")
async def _life(rig: Rig) -> None:
    async with rig.stand() as s:
        before = (await s.fleet.snapshot()).workers[0].id
        assert (await s.fleet.snapshot()).workers[0].id == before
        s.servers.restart(0)
        after = (await s.fleet.snapshot()).workers[0].id
        assert after != before
        assert after.component == before.component


@shows("ready:paused")
async def _paused(rig: Rig) -> None:
    async with rig.stand(2) as s:
        await s.pause(1)
        assert [w.paused for w in (await s.fleet.snapshot()).workers] == [False, True]
