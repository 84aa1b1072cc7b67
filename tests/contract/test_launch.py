"""Launching: what is started serves, what ends is reported, and nothing outlives the block.

The programs are real: embedded engines behind the flags of vLLM and SGLang, and lines of Python.
"""

import ctypes
import http.client
import json
import os
import pathlib
import pickle
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from pydantic import ValidationError

import genapi
from genapi import FleetError, Outcome, WeightPublisher
from genapi.events import ComponentEnded, ComponentReady, ComponentStarted, Event
from genapi.launcher import Launcher
from genapi.providers import dynamo, sglang
from genapi.types.config import Key
from genapi.types.launch import Deployment, Launchable
from tests.contract.embedded import greedy, request, weights
from tests.support.engine_process import STAND_INS
from tests.support.launched import (
    LIMIT_S,
    SERVE,
    Beside,
    alive,
    engines,
    gone,
    read_json,
    sessions,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="looks at processes"),
]

KEY, ADMIN_KEY = "the-key-of-requests", "the-key-of-administration"


PTRACE_SEIZE, WAIT_ALL = 0x4206, 0x40000000


class Seen:
    """What a launch told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def pid(self, component: str) -> int:
        """Of its latest life."""
        return [e.pid for e in self.started if e.component == component][-1]

    @property
    def started(self) -> list[ComponentStarted]:
        return [event for event in self.events if isinstance(event, ComponentStarted)]

    @property
    def ready(self) -> list[str]:
        return [event.component for event in self.events if isinstance(event, ComponentReady)]

    @property
    def ended(self) -> dict[str, int | None]:
        return {e.component: e.status for e in self.events if isinstance(e, ComponentEnded)}


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def url_of(launched: Launcher, name: str) -> str:
    assert launched.running is not None
    return next(c.url for c in launched.running.components if c.name == name)


def is_free(port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True


@contextmanager
def foreign_server(port: int = 0) -> Iterator[int]:
    """Somebody else's server, which says 200 to everything."""
    code = SERVE + "print(server.server_address[1], flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def unreapable(pid: int) -> Iterator[None]:
    """A process that its parent cannot see the end of, as of one that the kernel does not end.

    A process that is traced ends for its tracer alone until the tracer has waited for it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    if libc.ptrace(PTRACE_SEIZE, pid, None, None) != 0:
        pytest.skip(f"may not trace: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, WAIT_ALL)


async def test_servers_are_started_serve_and_are_gone_afterwards(tmp_path: pathlib.Path) -> None:
    seen = Seen()
    launched = genapi.launch(engines(2, api_key=KEY), folder=tmp_path, observe=seen)
    async with launched as fleet:
        snapshot = await fleet.snapshot()
        urls = [worker.url for worker in snapshot.workers]
        assert len(urls) == 2
        reply = await fleet.generate(request())
        assert len(reply.output.token_ids) == 8
        assert sorted(seen.ready) == ["worker0", "worker1"]
        pids = [pid for event in seen.started for pid in sessions(event.pid)]
        assert len(pids) == 2
        assert [mode(event.log) for event in seen.started] == [0o600, 0o600]
    assert not any(map(alive, pids))
    assert all(is_free(port_of(url)) for url in urls)
    assert set(seen.ended) == {"worker0", "worker1"}
    with pytest.raises(FleetError, match="used already"):
        await launched.__aenter__()


async def test_requests_go_through_the_gateway_and_no_key_is_on_a_command_line(
    tmp_path: pathlib.Path,
) -> None:
    seen = Seen()
    config = sglang.Launch(
        model="some/model",
        model_name="tiny",
        workers=2,
        api_key=KEY,
        admin_api_key=ADMIN_KEY,
        gateway=sglang.Gateway(),
        environment=STAND_INS,
    )
    async with genapi.launch(config, folder=tmp_path, observe=seen) as fleet:
        replies = [await fleet.generate(request()) for _ in range(2)]
        assert [len(reply.output.token_ids) for reply in replies] == [8, 8]
        assert seen.ready[-1] == "gateway"
        for event in seen.started:
            for pid in sessions(event.pid):
                assert KEY not in command_line(pid)
                assert ADMIN_KEY not in command_line(pid)
        assert "keys.yaml" not in files(tmp_path)  # read, and not needed any more
        async with WeightPublisher(fleet, transport=genapi.weights.Memory()) as publisher:
            await publisher.adopt(0)
        assert all(worker.version for worker in (await fleet.snapshot()).workers)


@pytest.mark.parametrize("status", [0, 3])
async def test_a_component_that_ends_takes_all_others_down_and_the_report_has_its_last_words(
    tmp_path: pathlib.Path, status: int
) -> None:
    code = SERVE + (
        "import os, time\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        f"print('these are the last words', flush=True); os._exit({status})"
    )
    seen = Seen()
    config = Beside(engines(), {"sidecar": code})
    launched = genapi.launch(config, folder=tmp_path / "logs", observe=seen)
    with pytest.raises(FleetError) as caught:
        await end_by(launched, (tmp_path / "go").touch)
    assert f"sidecar (pid {seen.pid('sidecar')})" in str(caught.value)
    assert f"ended with status {status}" in str(caught.value)
    assert "these are the last words" in str(caught.value)
    assert not alive(seen.pid("worker0"))


async def test_a_worker_that_is_left_alone_later_ends_the_start_while_the_fleet_is_not_ready(
    tmp_path: pathlib.Path,
) -> None:
    seen = Seen()

    def kill_at_once(event: Event) -> None:
        seen(event)
        if isinstance(event, ComponentReady) and event.component == "worker0":
            os.kill(seen.pid("worker0"), signal.SIGKILL)

    launched = genapi.launch(engines(), folder=tmp_path, on_exit="leave", observe=kill_at_once)
    with anyio.fail_after(LIMIT_S), pytest.raises(FleetError, match="was killed by SIGKILL"):
        async with launched:
            pytest.fail("there is no worker")


async def test_an_error_of_the_block_s_own_stays_and_says_which_worker_was_killed(
    tmp_path: pathlib.Path,
) -> None:
    seen = Seen()
    mine = RuntimeError("mine")

    async def block() -> None:
        async with genapi.launch(engines(), folder=tmp_path, observe=seen):
            os.kill(seen.pid("worker0"), signal.SIGKILL)
            try:
                await anyio.sleep(LIMIT_S)
            finally:
                raise mine

    with pytest.raises(RuntimeError) as caught:
        await block()
    assert caught.value is mine
    assert any("was killed by SIGKILL" in note for note in caught.value.__notes__)


async def test_an_error_in_the_block_is_the_same_outside_and_everything_is_stopped(
    tmp_path: pathlib.Path,
) -> None:
    seen = Seen()
    mine = RuntimeError("mine")
    with pytest.raises(RuntimeError) as caught:
        async with genapi.launch(engines(), folder=tmp_path, observe=seen):
            raise mine
    assert caught.value is mine
    assert not alive(seen.pid("worker0"))


async def test_a_cancelled_block_leaves_nothing(tmp_path: pathlib.Path) -> None:
    seen = Seen()
    with anyio.CancelScope() as scope:
        async with genapi.launch(engines(), folder=tmp_path, observe=seen):
            scope.cancel()
            await anyio.sleep(LIMIT_S)
    assert scope.cancelled_caught
    assert not alive(seen.pid("worker0"))


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: pathlib.Path) -> None:
    seen = Seen()
    with anyio.CancelScope() as scope:

        def observe(event: Event) -> None:
            seen(event)
            scope.cancel()

        async with genapi.launch(engines(2), folder=tmp_path, observe=observe):
            pytest.fail("it was cancelled when the first had started")
    assert scope.cancelled_caught
    assert seen.started
    assert not any(alive(event.pid) for event in seen.started)


async def test_a_killed_worker_is_restarted_by_the_publication_that_needs_it(
    tmp_path: pathlib.Path,
) -> None:
    seen = Seen()
    launched = genapi.launch(engines(2), folder=tmp_path, on_exit="leave", observe=seen)
    async with launched as fleet:
        before = {worker.url: worker.id for worker in (await fleet.snapshot()).workers}
        publisher = WeightPublisher(
            fleet, transport=genapi.weights.Memory(), restarter=launched.restart
        )
        await publisher.adopt(0)
        killed = seen.pid("worker1")
        os.kill(killed, signal.SIGKILL)
        await gone(killed)
        # Nobody listens there now, and yet the port is nobody else's.
        with socket.socket() as probe, pytest.raises(OSError, match="in use"):
            probe.bind(("127.0.0.1", port_of(list(before)[1])))
        report = await publisher.publish(1, genapi.weights.from_tensors(weights(1)))
        assert [receipt.outcome for receipt in report.receipts] == [Outcome.COMMITTED] * 2
        after = {worker.url: worker.id for worker in (await fleet.snapshot()).workers}
        assert list(after) == list(before)
        assert [after[url] == before[url] for url in before] == [True, False]
        for session in "abcd":
            reply = await fleet.generate(request(session=session))
            assert reply.output.token_ids == greedy(1, [1, 2, 3], 8)
    assert not any(alive(event.pid) for event in seen.started)


async def test_a_worker_that_lives_is_another_process_at_the_same_url_after_a_restart(
    tmp_path: pathlib.Path,
) -> None:
    seen = Seen()
    launched = genapi.launch(engines(), folder=tmp_path, observe=seen)

    async def restart_and_kill() -> None:
        async with launched as fleet:
            (worker,) = (await fleet.snapshot()).workers
            first = seen.pid("worker0")
            assert worker.id is not None
            await launched.restart(worker.id, worker.url)
            assert not alive(first)
            assert alive(seen.pid("worker0"))
            (again,) = (await fleet.snapshot()).workers
            assert again.url == worker.url
            assert again.id != worker.id
            with pytest.raises(FleetError, match="was not started by this launch"):
                await launched.restart(worker.id, "http://127.0.0.1:1")
            os.kill(seen.pid("worker0"), signal.SIGKILL)
            await anyio.sleep(LIMIT_S)
            pytest.fail("the new one was not watched")

    with pytest.raises(FleetError, match="was killed by SIGKILL"):
        await restart_and_kill()


async def test_a_worker_that_survives_being_killed_is_an_error_and_no_other_is_started_beside_it(
    tmp_path: pathlib.Path,
) -> None:
    seen = Seen()
    launched = genapi.launch(engines(), folder=tmp_path, stop_timeout_s=0.5, observe=seen)
    async with launched as fleet:
        (worker,) = (await fleet.snapshot()).workers
        assert worker.id is not None
        pid = seen.pid("worker0")
        with unreapable(pid):
            with pytest.raises(
                FleetError, match=rf"processes \[{pid}\] of worker0 survive SIGKILL"
            ):
                await launched.restart(worker.id, worker.url)
            assert [event.component for event in seen.started] == ["worker0"]


async def test_a_worker_that_cannot_be_restarted_is_an_error_with_its_log(
    tmp_path: pathlib.Path,
) -> None:
    once = f"import os, sys\npath = {str(tmp_path / 'started')!r}\n"
    once += "if os.path.exists(path): sys.exit('not a second time')\nopen(path, 'w').close()\n"
    config = Beside(engines(), {"other": once + SERVE + "threading.Event().wait()"}, worker=True)
    launched = genapi.launch(config, folder=tmp_path / "logs")
    async with launched as fleet:
        (worker,) = (await fleet.snapshot()).workers
        assert worker.id is not None
        url = url_of(launched, "other")
        with pytest.raises(FleetError, match="not a second time"):
            await launched.restart(worker.id, url)
        assert len((await fleet.generate(request())).output.token_ids) == 8


@pytest.mark.case("LAUNCH-03")
async def test_a_port_that_somebody_else_has_is_an_error_before_anything_is_started(
    tmp_path: pathlib.Path,
) -> None:
    seen = Seen()
    with foreign_server() as port:
        config = engines(2, ports=(free_port(), port))
        with pytest.raises(FleetError, match=rf"worker1 cannot have port {port} .*in use"):
            async with genapi.launch(config, folder=tmp_path, observe=seen):
                pytest.fail("somebody else's server was taken for the worker")
    assert seen.started == []


@pytest.mark.case("LAUNCH-03")
@pytest.mark.parametrize("asked_for", [True, False])
async def test_whoever_takes_the_port_first_is_not_taken_for_the_component(
    tmp_path: pathlib.Path, *, asked_for: bool
) -> None:
    # It listens only when told to. Somebody else is quicker, and answers 200 meanwhile.
    wait = (
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    )
    port = free_port() if asked_for else None
    config = Beside(engines(), {"slow": wait + SERVE + "threading.Event().wait()"}, port=port)
    launched = genapi.launch(config, folder=tmp_path / "logs")
    stolen: list[int] = []

    async def steal() -> None:
        while launched.running is None:  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.01)
        with foreign_server(port_of(url_of(launched, "slow"))) as taken:
            stolen.append(taken)
            await anyio.to_thread.run_sync(answers_three_times, taken)
            (tmp_path / "go").touch()
            await finished.wait()

    finished = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(steal)
        if asked_for:
            with pytest.raises(FleetError, match="somebody else listens at a port"):
                async with launched:
                    pytest.fail("somebody else's server was taken for the component")
        else:
            async with launched:
                assert port_of(url_of(launched, "slow")) not in stolen
        finished.set()
    assert stolen


@pytest.mark.case("LAUNCH-06")
async def test_what_is_not_ready_in_time_is_killed_with_all_its_children(
    tmp_path: pathlib.Path,
) -> None:
    stubborn = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "code = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); '\n"
        "code += 'time.sleep(600)'\n"
        "same = subprocess.Popen([sys.executable, '-c', code])\n"
        "other = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{same.pid}} {{other.pid}}')\n"
        "time.sleep(600)\n"
    )
    seen, port = Seen(), free_port()
    config = Beside(None, {"stubborn": stubborn}, port=port)
    launched = genapi.launch(
        config, folder=tmp_path / "1", start_timeout_s=5, stop_timeout_s=0.5, observe=seen
    )
    with pytest.raises(FleetError, match=r"stubborn did not serve within start_timeout_s=5"):
        async with launched:
            pytest.fail("it never answered")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text(encoding="utf-8").split()]
    assert len(pids) == 2
    assert not any(map(alive, [*pids, seen.pid("stubborn")]))
    assert seen.ended["stubborn"] == -signal.SIGKILL
    again = Beside(engines(), {"stubborn": SERVE + "threading.Event().wait()"}, port=port)
    async with genapi.launch(again, folder=tmp_path / "2"):
        pass


async def test_a_flag_that_the_engine_refuses_is_in_the_error_as_the_engine_says_it(
    tmp_path: pathlib.Path,
) -> None:
    config = engines(2, flags=("--no-such-flag=1",))
    with pytest.raises(FleetError, match=r"(?s)ended with status 2.*--no-such-flag=1"):
        async with genapi.launch(config, folder=tmp_path):
            pytest.fail("it cannot have started")


async def test_a_folder_that_cannot_be_made_is_an_error_in_no_group(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FleetError, match=r"folder of the launch cannot be made: .*file"):
        async with genapi.launch(engines(), folder=tmp_path / "file"):
            pytest.fail("it cannot have started")


async def test_a_folder_of_a_component_that_cannot_be_made_is_an_error_in_no_group(
    tmp_path: pathlib.Path,
) -> None:
    config = Beside(engines(), {"long" * 99: SERVE})
    with pytest.raises(FleetError, match=r"long cannot have its folder .* name too long"):
        async with genapi.launch(config, folder=tmp_path):
            pytest.fail("it cannot have started")


async def test_a_worker_is_not_restarted_without_its_folder_and_the_error_says_so(
    tmp_path: pathlib.Path,
) -> None:
    launched = genapi.launch(engines(), folder=tmp_path / "logs")
    async with launched as fleet:
        (worker,) = (await fleet.snapshot()).workers
        assert worker.id is not None
        (tmp_path / "logs").rename(tmp_path / "moved")
        with pytest.raises(FleetError, match="worker0 cannot have its folder"):
            await launched.restart(worker.id, worker.url)


async def test_a_file_with_keys_that_cannot_be_removed_does_not_end_what_serves(
    tmp_path: pathlib.Path,
) -> None:
    replaces = "import os; os.remove('keys.json'); os.mkdir('keys.json')\n"
    config = Beside(
        engines(),
        {"other": replaces + SERVE + "threading.Event().wait()"},
        files={"keys.json": {"key": Key(KEY)}},
    )
    async with genapi.launch(config, folder=tmp_path) as fleet:
        assert len((await fleet.generate(request())).output.token_ids) == 8


async def test_a_program_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    config = engines(python="/no/such/python")
    with pytest.raises(FleetError, match="'/no/such/python' cannot be run: No such file"):
        async with genapi.launch(config, folder=tmp_path):
            pytest.fail("it cannot have started")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (engines(api_key="env:GENAPI_KEY_UNSET"), r"VLLM_API_KEY: .*GENAPI_KEY_UNSET"),
        (engines(api_key=" "), "VLLM_API_KEY: "),
        (engines(environment={**STAND_INS, "HF_TOKEN": "env:GENAPI_KEY_UNSET"}), "HF_TOKEN: "),
        (
            sglang.Launch(model="m", admin_api_key="env:GENAPI_KEY_UNSET", environment=STAND_INS),
            r"admin-api-key: .*GENAPI_KEY_UNSET",
        ),
    ],
)
async def test_a_key_that_is_not_set_is_an_error_before_anything_is_started(
    tmp_path: pathlib.Path, config: Launchable, message: str
) -> None:
    seen = Seen()
    config = Beside(config, {"first": SERVE + "threading.Event().wait()"})
    with pytest.raises(genapi.ConfigError, match=f"{message}.* holds no key"):
        async with genapi.launch(config, folder=tmp_path, observe=seen):
            pytest.fail("a server without a key is open")
    assert seen.started == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"flags": ("--x=a\0b",)}, r"worker0: argv\[\d+\]='--x=a\\x00b' holds a NUL"),
        ({"model": "a\0b"}, r"argv\[\d+\]='--model=a\\x00b' holds a NUL"),
        ({"flags": ("--x=\ud800",)}, r"argv\[\d+\]='--x=\\ud800' holds half of a character"),
        ({"python": "a\0b"}, r"argv\[0\]='a\\x00b' holds a NUL"),
        ({"python": ""}, r"argv=\('', .*names no program"),
        ({"environment": {"A": "x\0y"}}, r"environment\['A'\]='x\\x00y' holds a NUL"),
        ({"environment": {"A": "\ud800"}}, r"environment\['A'\]='\\ud800' holds half"),
        ({"environment": {"A=B": "x"}}, "environment: 'A=B' is no name of a variable"),
        ({"environment": {"": "x"}}, "environment: '' is no name of a variable"),
        ({"environment": {"A\0B": "x"}}, r"environment: 'A\\x00B' holds a NUL"),
        ({"host": "a\0b"}, r"worker0: host='a\\x00b' is none"),
        ({"api_key": "the\0key"}, "worker0: the key 'VLLM_API_KEY' holds a NUL"),
    ],
)
async def test_what_no_program_can_be_given_is_an_error_before_anything_is_started(
    tmp_path: pathlib.Path, fields: dict[str, Any], message: str
) -> None:
    seen = Seen()
    launched = genapi.launch(engines(**fields), folder=tmp_path, observe=seen)
    with pytest.raises(genapi.ConfigError, match=message) as shown:
        launched.dry_run()
    with pytest.raises(genapi.ConfigError, match=message):
        async with launched:
            pytest.fail("what cannot be started served")
    assert "the\0key" not in str(shown.value)
    assert seen.events == []


@pytest.mark.parametrize(
    ("names", "fields", "message"),
    [
        (("one",), {"after": ("nobody",)}, "one: after=.* names 'nobody', which is no component"),
        (("one", "two"), {"after": ("one",)}, "can start first: one after one"),
        (("one", "two"), {"after": ("two", "one")}, "can start first: .* after"),
        (("one",), {"argv": ()}, r"one: argv=\(\) names no program"),
        (("one",), {"url": "http://127.0.0.1"}, "'http://127.0.0.1' names no port"),
        (("one",), {"files": {"../key": {}}}, "'../key' is to be the name of a folder or file"),
        (("a/b",), {}, "'a/b' is to be the name of a folder or file"),
        (("one",), {"name": "two"}, "component 'two' is 1 times .* and 0 times among their needs"),
        (("one", "two"), {"name": "one"}, "component 'one' is 2 times among the components"),
    ],
)
async def test_a_launch_of_one_s_own_that_cannot_start_is_an_error_before_anything_is_started(
    tmp_path: pathlib.Path, names: tuple[str, ...], fields: dict[str, Any], message: str
) -> None:
    seen = Seen()
    config = Beside(None, dict.fromkeys(names, SERVE), more=fields)
    launched = genapi.launch(config, folder=tmp_path, observe=seen)
    with pytest.raises(genapi.ConfigError, match=message):
        launched.dry_run()
    with anyio.fail_after(LIMIT_S), pytest.raises(genapi.ConfigError, match=message):
        async with launched:
            pytest.fail("what cannot be started served")
    assert seen.events == []


def test_a_folder_that_no_path_names_is_refused() -> None:
    with pytest.raises(genapi.ConfigError, match=r"folder='a\\x00b' holds a NUL"):
        genapi.launch(engines(), folder="a\0b")


def test_a_model_in_the_home_of_nobody_is_taken_as_a_name() -> None:
    launched = genapi.launch(engines(model="~nobody-of-that-name/model"))
    (worker,) = launched.dry_run().components
    assert "--model=~nobody-of-that-name/model" in worker.argv


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refresh_s": -1.0}, "refresh_s"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"board": "nosuch://board"}, "board scheme 'nosuch' is not known"),
    ],
)
async def test_an_option_of_the_fleet_that_cannot_work_is_an_error_before_anything_is_started(
    tmp_path: pathlib.Path, options: dict[str, Any], message: str
) -> None:
    seen = Seen()
    with pytest.raises(ValidationError, match=message):
        async with genapi.launch(engines(), folder=tmp_path, observe=seen, **options):
            pytest.fail("there is no such fleet")
    assert seen.started == []


async def test_a_key_that_a_program_prints_is_hidden_in_the_error(tmp_path: pathlib.Path) -> None:
    code = "import os, sys; sys.exit('my token is ' + os.environ['SOME_TOKEN'])"
    config = Beside(None, {"talker": code}, variables={"SOME_TOKEN": Key(KEY)})
    with pytest.raises(FleetError, match=r"my token is \*+") as caught:
        async with genapi.launch(config, folder=tmp_path):
            pytest.fail("it cannot have started")
    assert KEY not in str(caught.value)


async def test_a_variable_with_a_secret_may_be_any_text_and_no_line_of_it_is_shown(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f'{{\n  "size": 1,\n  "token": "{KEY} \u00e9"\n}}\n'
    monkeypatch.setenv("MINE", text)
    given = engines(environment={"SOME_LINES": text, "SOME_TOKEN": "env:MINE"}).environment
    code = (
        "import json, os, sys\n"
        "names = ['SOME_LINES', 'SOME_TOKEN']\n"
        f"json.dump([os.environ[n] for n in names], open({str(tmp_path / 'seen')!r}, 'w'))\n"
        "sys.exit('\\n> '.join(os.environ['SOME_LINES'].splitlines()))"
    )
    config = Beside(None, {"talker": code}, variables=given)
    with pytest.raises(FleetError, match=r"> +\*+") as caught:
        async with genapi.launch(config, folder=tmp_path / "logs"):
            pytest.fail("it cannot have started")
    assert KEY not in str(caught.value)
    seen: object = read_json(tmp_path / "seen")
    assert seen == [text, text]


async def test_nothing_of_the_starter_s_environment_is_inherited_that_is_not_meant_to_be(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = {
        "ALL_PROXY": "socks5://p:1",
        "DYN_NAMESPACE": "another",
        "DYN_SYSTEM_PORT": "1",
        "ETCD_AUTH_PASSWORD": "x",
        "HTTPS_PROXY": "http://p:1",
        "NATS_AUTH_TOKEN": "x",
        "PYTHONPATH": "/somebody/s/checkout",
        "SGLANG_TEST": "1",
        "SOME_API_KEY": "x",
        "VIRTUAL_ENV": "/x",
        "VLLM_API_KEY": "x",
        "VLLM_PLUGINS": "none",
        "http_proxy": "http://p:1",
    }
    meant = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "HF_HOME": "/hub", "MINE": "1"}
    for name, value in (foreign | meant).items():
        monkeypatch.setenv(name, value)
    code = f"import json, os\njson.dump(dict(os.environ), open({str(tmp_path / 'seen')!r}, 'w'))\n"
    config = Beside(engines(inherit=("MINE",)), {"looker": code + SERVE + "sys.stdin.read()"})
    with pytest.raises(FleetError, match="looker"):  # its input is empty, so that it ends
        async with genapi.launch(config, folder=tmp_path / "logs"):
            await anyio.sleep(LIMIT_S)
    found = read_json(tmp_path / "seen")
    assert isinstance(found, dict)
    assert foreign.keys() & found.keys() == set()
    assert {name: found.get(name) for name in meant} == meant
    assert found["PATH"] == os.environ["PATH"]


@pytest.mark.case("LAUNCH-01")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_nothing_outlives_the_process_that_launched(
    tmp_path: pathlib.Path, number: signal.Signals
) -> None:
    process = await anyio.open_process(
        [sys.executable, "-m", "tests.support.launching_program", str(tmp_path)],
        stderr=None,
        env={**os.environ, **STAND_INS},
        start_new_session=True,
    )
    assert process.stdout is not None
    async with process:
        with anyio.fail_after(LIMIT_S):
            line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 65536)
        facts = json.loads(line)
        try:
            assert len(facts["pids"]) == 3
            assert all(map(alive, facts["pids"]))
            process.send_signal(number)
            await gone(process.pid, *facts["pids"])
            assert all(is_free(port_of(url)) for url in facts["urls"])
            assert alive(facts["forked"])  # only what was launched was signalled
        finally:
            os.kill(facts["forked"], signal.SIGKILL)
            with suppress(ProcessLookupError):
                process.kill()


async def test_a_component_ends_also_where_its_keeper_was_killed(tmp_path: pathlib.Path) -> None:
    seen = Seen()
    launched = genapi.launch(engines(), folder=tmp_path, observe=seen)
    with pytest.raises(FleetError, match="worker0"):
        await end_by(launched, lambda: os.kill(parent(seen.pid("worker0")), signal.SIGKILL))
    await gone(seen.pid("worker0"))


async def test_a_dry_run_starts_nothing_and_shows_everything_but_keys(
    tmp_path: pathlib.Path,
) -> None:
    launched = genapi.launch(engines(2, api_key=KEY), folder=tmp_path / "logs")
    shown = str(launched.dry_run())
    for part in ("worker0", "worker1", "--model=some/model", "VLLM_API_KEY=", "vllm://127.0.0.1:"):
        assert part in shown
    assert KEY not in shown
    assert KEY not in repr(launched.dry_run())
    assert files(tmp_path) == []


def test_a_port_is_below_what_the_program_can_read() -> None:
    config = dynamo.Launch(model="some/model", workers=20)
    frontend, *workers = genapi.launch(config).dry_run().components
    ports = [port_of(worker.url) for worker in workers]
    assert max(ports) < 32768
    assert len({*ports, port_of(frontend.url)}) == 21


async def test_two_launches_never_choose_one_port(tmp_path: pathlib.Path) -> None:
    # From the same hundred ports: where they could hold the same ones, they would.
    code = SERVE + "threading.Event().wait()"
    first = genapi.launch(Beside(engines(), {"many": code}, more_ports=60), folder=tmp_path)
    second = genapi.launch(Beside(None, {"many": code}, more_ports=30))
    async with first:
        assert first.running is not None
        held, found = (ports_said(d) for d in (first.running, second.dry_run()))
    assert (len(held), len(found)) == (60, 30)
    assert held & found == set()


@pytest.mark.case("LAUNCH-03")
@pytest.mark.parametrize("asked_for", [True, False])
async def test_a_port_of_another_launch_is_refused_though_nothing_listens_there_yet(
    tmp_path: pathlib.Path, *, asked_for: bool
) -> None:
    wait = (
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    )
    codes = {"slow": wait + SERVE + "threading.Event().wait()"}
    first = genapi.launch(
        Beside(engines(), codes, port=free_port() if asked_for else None), folder=tmp_path / "one"
    )
    served, seen = anyio.Event(), Seen()

    async def serve() -> None:
        async with first:
            served.set()

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            while first.running is None:  # noqa: ASYNC110 - nobody tells
                await anyio.sleep(0.01)
            port = port_of(url_of(first, "slow"))
            second = genapi.launch(engines(ports=(port,)), folder=tmp_path / "two", observe=seen)
            with pytest.raises(
                FleetError, match=rf"cannot have port {port} .*another launch holds"
            ):
                async with second:
                    pytest.fail("two launches had one port")
            (tmp_path / "go").touch()
    assert served.is_set()
    assert seen.started == []
    async with genapi.launch(engines(ports=(port,)), folder=tmp_path / "three"):
        pass  # nobody holds it any more


async def test_a_provider_that_is_not_there_is_an_error_before_anything_is_started(
    tmp_path: pathlib.Path,
) -> None:
    config = Beside(None, {"one": SERVE}, provider="nosuch")
    launched = genapi.launch(config, folder=tmp_path)
    with pytest.raises(genapi.ConfigError, match="unknown provider 'nosuch'"):
        await launched.__aenter__()
    assert files(tmp_path) == []


def test_a_launch_does_not_travel_to_other_processes() -> None:
    with pytest.raises(TypeError, match=r"send fleet\.config"):
        pickle.dumps(genapi.launch(engines()))


@pytest.mark.parametrize("name", ["start_timeout_s", "stop_timeout_s"])
def test_a_bound_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(genapi.ConfigError, match=name):
        genapi.launch(engines(), **{name: 0})  # type: ignore[arg-type]


async def end_by(launched: Launcher, act: Callable[[], object]) -> None:
    """Do something that ends a launch from inside."""
    async with launched:
        act()
        await anyio.sleep(LIMIT_S)
        pytest.fail("the block was not cancelled")


def ports_said(deployment: Deployment) -> set[int]:
    """The ports that `Beside` has asked for besides."""
    text = deployment.components[-1].environment["MORE_PORTS"]
    assert isinstance(text, str)
    return set(map(int, text.split()))


def files(folder: pathlib.Path) -> list[str]:
    return [path.name for path in folder.rglob("*")]


def mode(path: str) -> int:
    return stat.S_IMODE(pathlib.Path(path).stat().st_mode)


def command_line(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")


def parent(pid: int) -> int:
    line = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return int(line.rpartition(")")[2].split()[1])


def answers_three_times(port: int) -> None:
    for _ in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
