"""Real servers launched: they serve, are published to and restarted, and end."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

import genapi
from genapi import FleetError, Outcome
from genapi.events import ComponentStarted, Event
from tests.engines.conftest import environment
from tests.engines.kit.launches import launch_of
from tests.engines.test_vllm import LIMITS, PROMPT, everywhere, weights
from tests.support.launched import alive, sessions

if TYPE_CHECKING:
    from tests.engines.conftest import Models, Reference

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900), pytest.mark.anyio]

START_S = 240.0
LIMIT_S = 60.0
BOTH = pytest.mark.parametrize("scheme", ["vllm", "sglang"])
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Started:
    """The processes of what a launch started."""

    def __init__(self) -> None:
        self.leaders: dict[str, int] = {}
        self.all: list[int] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, ComponentStarted):
            self.leaders[event.component] = event.pid

    def look(self) -> None:
        """Note the processes that there are now."""
        self.all += [pid for leader in self.leaders.values() for pid in sessions(leader)]


@pytest.mark.parametrize("scheme", ["vllm", "sglang", "dynamo"])
async def test_launched_servers_are_published_to_and_a_killed_one_is_restarted_for_it(
    scheme: str, models: Models, reference: Reference, tmp_path: pathlib.Path
) -> None:
    config = launch_of(scheme, environment(scheme), models.seed0, workers=2)
    started = Started()
    launched = genapi.launch(
        config,
        folder=tmp_path,
        start_timeout_s=START_S,
        on_exit="leave",
        observe=started,
    )
    async with launched as fleet:
        started.look()
        assert len(started.all) > 2  # engines have processes of their own
        before = {worker.url: worker.id for worker in (await fleet.snapshot()).workers}
        publisher = genapi.WeightPublisher(
            fleet,
            transport=genapi.weights.Gloo(timeout_s=20),
            timeouts=LIMITS.model_copy(update={"restart_s": START_S}),
            restarter=launched.restart,
        )
        async with publisher:
            await publisher.publish(1, weights(models.seed1))
            for reply in await everywhere(fleet):
                reference(models.seed1, PROMPT, 16).assert_said_by(list(reply.output.token_ids))
            os.kill(started.leaders["worker1"], signal.SIGKILL)
            report = await publisher.publish(2, weights(models.seed0))
            assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 2
            started.look()
        after = {worker.url: worker.id for worker in (await fleet.snapshot()).workers}
        assert [after[url] == before[url] for url in before] == [True, False]
        for reply in await everywhere(fleet):
            reference(models.seed0, PROMPT, 16).assert_said_by(list(reply.output.token_ids))
    assert not any(map(alive, started.all))


@BOTH
async def test_a_killed_server_ends_the_block_with_a_report_and_its_engine_with_it(
    scheme: str, models: Models, tmp_path: pathlib.Path
) -> None:
    keys = {"api_key": "key-of-requests"}
    if scheme == "sglang":
        keys["admin_api_key"] = "key-of-administration"
    config = launch_of(scheme, environment(scheme), models.seed0, **keys)
    started = Started()
    launched = genapi.launch(
        config,
        folder=tmp_path,
        start_timeout_s=START_S,
        observe=started,
    )

    async def block() -> None:
        async with launched as fleet:
            started.look()
            await knows_its_keys(fleet)
            lines = [command_line(pid) for pid in started.all]
            assert not any(key in line for key in keys.values() for line in lines)
            os.kill(started.leaders["worker0"], signal.SIGKILL)
            await anyio.sleep(LIMIT_S)
            pytest.fail("the block was not cancelled")

    with pytest.raises(FleetError, match=r"(?s)worker0 .* was killed by SIGKILL; .*log.txt ends:"):
        await block()
    assert len(started.all) > 1
    assert not any(map(alive, started.all))


async def knows_its_keys(fleet: genapi.Fleet) -> None:
    """The server asks for keys, and the fleet has them."""
    assert len(await everywhere(fleet)) == 1
    transport = genapi.weights.Gloo(timeout_s=20)
    async with genapi.WeightPublisher(fleet, transport=transport) as publisher:
        await publisher.adopt(0)
    async with genapi.connect(fleet.config.target, model="tiny") as stranger:
        with pytest.raises(genapi.AuthError):
            await everywhere(stranger)


@pytest.mark.parametrize(
    ("scheme", "number"), [("vllm", signal.SIGINT), ("sglang", signal.SIGKILL)]
)
async def test_no_process_of_an_engine_outlives_the_program_that_launched_it(
    scheme: str, number: signal.Signals, models: Models, tmp_path: pathlib.Path
) -> None:
    config = launch_of(scheme, environment(scheme), models.seed0)
    arguments = (scheme, config.model_dump_json(), str(tmp_path))
    process = await anyio.open_process(
        [sys.executable, "-m", "tests.engines.kit.launches", *arguments],
        stderr=None,
        cwd=ROOT,
        start_new_session=True,
    )
    assert process.stdout is not None
    async with process:
        try:
            with anyio.fail_after(START_S):
                line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 65536)
            pids: list[int] = json.loads(line)
            assert len(pids) > 1
            process.send_signal(number)
            with anyio.fail_after(LIMIT_S):
                await process.wait()
                while any(map(alive, pids)):  # noqa: ASYNC110 - they are nobody's children here
                    await anyio.sleep(0.1)
        finally:
            with suppress(ProcessLookupError):
                process.kill()


@BOTH
async def test_what_an_engine_says_of_a_bad_flag_is_in_the_error(
    scheme: str, models: Models, tmp_path: pathlib.Path
) -> None:
    config = launch_of(scheme, environment(scheme), models.seed0)
    bad = config.model_copy(update={"flags": (*config.flags, "--no-such-flag=1")})
    launched: Any = genapi.launch(bad, folder=tmp_path, start_timeout_s=START_S)
    with pytest.raises(FleetError, match=r"(?s)ended with status 2.*--no-such-flag=1"):
        await launched.__aenter__()


@BOTH
async def test_a_port_that_is_taken_is_an_error_before_an_engine_is_started(
    scheme: str, models: Models, tmp_path: pathlib.Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = launch_of(scheme, environment(scheme), models.seed0, ports=(port,))
        started = Started()
        launched = genapi.launch(config, folder=tmp_path, observe=started)
        with pytest.raises(FleetError, match=rf"cannot have port {port} .*in use"):
            await launched.__aenter__()
        assert started.leaders == {}


def command_line(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
