"""`launch()`: starts the servers of a fleet, and ends them with the block, whatever happens in it.

    launched = genapi.launch(genapi.providers.vllm.Launch(model=..., workers=2))
    print(launched.dry_run())
    async with launched as fleet:
        ...

What is started, and how, is a value that a provider's `Launch` builds (`genapi.types.launch`);
this module gives it ports and folders, looks keys up, runs it and watches it. Ports are held for as
long as the launch lives: bound here and never listened at, so that the kernel gives them to nobody
else and only what was started can listen there.

The rule of this file: the end of a component is noticed before an answer on its port is believed,
and nothing outlives the block.
"""

import errno
import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Literal, NoReturn, Unpack, get_args
from urllib.parse import urlsplit

import anyio

from genapi.board import Board
from genapi.credentials import looked_up, resolve
from genapi.ending import to_the_end
from genapi.errors import ConfigError, FleetError, GenAPIError, TransportError
from genapi.events import ComponentEnded, ComponentReady, ComponentStarted, Observe, guarded, ignore
from genapi.fleet import Fleet, FleetOptions, connect
from genapi.providers import registry
from genapi.transports.base import Plane
from genapi.transports.http_aiohttp import AiohttpTransport
from genapi.transports.process import Program
from genapi.types.arguments import one_of, seconds, with_methods
from genapi.types.config import HiddenText, Key
from genapi.types.ids import WorkerId
from genapi.types.launch import Component, Deployment, Launchable, Need, Place, PortWish
from genapi.wire.http import HTTPCall

__all__ = ("Launcher", "launch")

_log = logging.getLogger(__name__)

OnExit = Literal["stop", "leave"]

_INHERITED = (
    "HOME", "HOSTNAME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL",
    "SSL_CERT_DIR", "SSL_CERT_FILE", "TERM", "TMPDIR", "TZ", "USER",
    "CC", "CXX", "CPATH", "LIBRARY_PATH",
    "HF_DATASETS_OFFLINE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "DO_NOT_TRACK",
)  # fmt: skip
_INHERITED_PREFIXES = (
    "LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "FI_", "ROCM_", "HIP_", "HSA_", "ROCR_",
    "OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "TRITON_",
)  # fmt: skip
_PORT_TRIES = 3
_PORT_TAKEN = "ddress already in use"
_PORT_TAKEN_LINES = 200
_LOWEST_PORT = 15000
_LOOK_S = 0.2
_LOOK_LIMIT_S = 5.0
_CLOSE_S = 5.0
_KEY_SHOWN_FROM = 4
"""Shorter keys hide nothing, and hiding them would spoil what the log says."""


def launch(
    config: Launchable,
    *,
    folder: str | os.PathLike[str] | None = None,
    start_timeout_s: float = 1800.0,
    stop_timeout_s: float = 15.0,
    on_exit: OnExit = "stop",
    run: str | None = None,
    board: str | Board | None = None,
    observe: Observe = ignore,
    **options: Unpack[FleetOptions],
) -> "Launcher":
    """The servers that `config` describes, and the fleet that they are; nothing is started yet.

    Args:
        config: `genapi.providers.vllm.Launch(...)`, or that of another provider.
        folder: where logs and working folders go; None = a new temporary one, which is kept.
        start_timeout_s: how long a component may take until it serves.
        stop_timeout_s: how long after SIGTERM a component and its whole group get SIGKILL.
        on_exit: what follows when a worker ends by itself, with whatever status. `stop`: all others
            are stopped and the block ends with `FleetError`. `leave`: the others go on, and
            `restart` brings it back. A frontend or a gateway that ends stops all, and so does
            a worker that ends before the fleet is ready.
        run: as for `connect`.
        board: as for `connect`.
        observe: called with every event, also with those of components.
        options: the other options of `connect`, over what the launch sets.

    Entering the block raises `FleetError` where a component does not come to serve, and
    what `connect` raises or `ConfigError` for a key that is not set before anything is started.

    Raises:
        ConfigError: an argument cannot be taken; the message names it and what to pass.
    """
    return Launcher(
        config,
        folder=folder,
        start_timeout_s=start_timeout_s,
        stop_timeout_s=stop_timeout_s,
        on_exit=on_exit,
        connect_to=lambda deployment: connect(
            deployment.fleet, run=run, board=board, observe=observe, **options
        ),
        observe=observe,
    )


class Launcher:
    """What `launch` returns: `async with` it for the fleet, once.

    `restart` is a restarter for `WeightPublisher`.
    """

    def __init__(
        self,
        config: Launchable,
        *,
        folder: str | os.PathLike[str] | None,
        start_timeout_s: float,
        stop_timeout_s: float,
        on_exit: OnExit,
        connect_to: Callable[[Deployment], Fleet],
        observe: Observe,
    ) -> None:
        start_timeout_s = seconds("start_timeout_s", start_timeout_s)
        stop_timeout_s = seconds("stop_timeout_s", stop_timeout_s)
        one_of("on_exit", on_exit, get_args(OnExit))
        if not isinstance(folder, str | os.PathLike | None):
            raise ConfigError(f"folder={folder!r}: pass the path of a directory, or None")
        if folder is not None and "\0" in os.fsdecode(folder):
            raise ConfigError(f"folder={folder!r} holds a NUL, which no path can")
        with_methods("observe", observe, ["__call__"], remedy="pass a function that takes an event")
        remedy = "pass genapi.providers.vllm.Launch(...), or another that can be launched"
        with_methods("config", config, ["located", "plan"], remedy=remedy)
        self._config = config.located(_absolute)
        self._root = None if folder is None else Path(folder).absolute()
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._on_exit = on_exit
        self._connect_to = connect_to
        self._observe = guarded(observe)
        self._context: AbstractAsyncContextManager[Fleet] | None = None
        self._lives: dict[str, _Life] = {}
        self._ports: dict[str, _Ports] = {}
        self._ready: dict[str, anyio.Event] = {}
        self._locks: dict[str, anyio.Lock] = {}
        self._served = False
        self._failure: FleetError | None = None
        self._body: anyio.CancelScope | None = None
        self._transport: AiohttpTransport | None = None

    async def __aenter__(self) -> Fleet:
        if self._context is not None:
            raise FleetError("this launch was used already; call genapi.launch again")
        self._context = self._deployed()
        return await self._context.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        assert self._context is not None  # noqa: S101 - it was entered
        return await self._context.__aexit__(kind, error, trace)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a launch does not pickle; send fleet.config and genapi.connect() there")

    @property
    def running(self) -> Deployment | None:
        """What was started, where each component is now; None before."""
        lives = {name: life.number for name, life in self._lives.items()}
        return self._plan(lives) if self._ports else None

    def dry_run(self) -> Deployment:
        """What would be started, at ports that are free now. `str` shows it, keys masked.

        Nothing is started, written or looked up. Ports that are not given are others when it
        starts, and so is a folder that is not given.

        Raises:
            ConfigError: it cannot be started.
            FleetError: a port cannot be had.
        """
        root = self._root or Path(tempfile.gettempdir(), "genapi-launch")
        ports: dict[str, _Ports] = {}
        try:
            for need in self._config.needs:
                free = {name: wish for name, wish in need.ports.items() if wish.number is None}
                ports[need.component] = _Ports(need.model_copy(update={"ports": free}))
            places = {}
            for need in self._config.needs:
                asked = {n: wish.number for n, wish in need.ports.items() if wish.number}
                numbers = asked | ports[need.component].numbers
                places[need.component] = _place(root, need.component, 1, numbers)
            deployment = self._config.plan(places)
            deployment.check(self._config.needs)
            return deployment
        finally:
            for held in ports.values():
                held.release()

    async def restart(self, worker: WorkerId, url: str) -> None:
        """Stop the worker at `url` and start it again there; returns when it serves.

        Its weights are those it was started with: it gets no requests before it was published to.

        Raises:
            FleetError: no worker was started at that URL, it survives SIGKILL, or it did not come
                back.
        """
        name = next((n for n, life in self._lives.items() if life.serves(url)), None)
        if name is None:
            raise FleetError(f"{worker} at {url} was not started by this launch")
        async with self._locks[name]:
            life = self._lives[name]
            life.watched = False
            life.scope.cancel()
            await life.program.gone.wait()
            life = await self._begin(name)
            try:
                await self._until_ready(life)
            except anyio.get_cancelled_exc_class():
                life.watched = True  # nobody waits for it any more
                raise

    @asynccontextmanager
    async def _deployed(self) -> AsyncIterator[Fleet]:
        registry.provider(self._config.provider)
        error: BaseException | None = None
        fleet: Fleet | None = None
        self._transport = AiohttpTransport(
            Plane(connect_timeout_s=_LOOK_LIMIT_S, idle_timeout_s=_LOOK_LIMIT_S, keep_alive=False)
        )
        try:
            async with anyio.create_task_group() as self._group:
                try:
                    with anyio.CancelScope() as self._body:
                        try:
                            self._prepare()
                            self._check()
                            await self._start_all()
                            fleet = self._connect_to(self._plan())
                            await fleet.open()
                            await fleet.wait_ready(self._start_timeout_s)
                            self._served = True
                            yield fleet
                        except (Exception, KeyboardInterrupt, SystemExit) as caught:  # noqa: BLE001
                            error = caught  # raised when everything was stopped, and in no group
                finally:
                    for life in self._lives.values():
                        life.watched = False
                    if fleet is not None:
                        await fleet.aclose()
                    self._group.cancel_scope.cancel()
        finally:
            for held in self._ports.values():
                held.release()
            await to_the_end(
                self._transport.aclose, what="the transport of a launch", limit_s=_CLOSE_S
            )
        if error is None and self._failure is not None:
            raise self._failure
        if error is not None:
            if self._failure is not None and error is not self._failure:
                error.add_note(str(self._failure))
            raise error

    def _prepare(self) -> None:
        """Make the folder, and hold the ports.

        Raises:
            FleetError: the folder cannot be made, or a port is somebody else's.
        """
        try:
            if self._root is None:
                self._root = Path(tempfile.mkdtemp(prefix="genapi-launch-"))
            else:
                self._root.mkdir(parents=True, exist_ok=True)
                self._root = _new_folder(self._root, "launch")
            (self._root / "shared").mkdir()
        except OSError as error:
            raise FleetError(f"the folder of the launch cannot be made: {error}") from error
        for need in self._config.needs:
            self._ports[need.component] = _Ports(need)
            self._ready[need.component] = anyio.Event()
            self._locks[need.component] = anyio.Lock()

    def _check(self) -> None:
        """Find out what cannot work while nothing was started.

        Raises:
            ConfigError: it cannot be started, a key is not set, or the fleet cannot be connected
                to in that way.
        """
        deployment = self._plan()
        deployment.check(self._config.needs)
        self._connect_to(deployment)  # contacts nothing; the ports may still be others later
        for component in deployment.components:
            for values in (component.environment, *component.files.values()):
                _texts(values, [])

    def _plan(self, folders: Mapping[str, int] = {}) -> Deployment:
        """The deployment at the ports that are held; `folders` are the lives by component."""
        assert self._root is not None  # noqa: S101 - it was made
        places = {
            name: _place(self._root, name, folders.get(name, 1), held.numbers)
            for name, held in self._ports.items()
        }
        return self._config.plan(places)

    async def _start_all(self) -> None:
        errors: list[GenAPIError] = []

        async def bring_up(component: Component) -> None:
            try:
                for name in component.after:
                    await self._ready[name].wait()
                await self._bring_up(component.name)
            except GenAPIError as error:
                errors.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for component in self._plan().components:
                group.start_soon(bring_up, component)
        if errors:
            raise errors[0]

    async def _bring_up(self, name: str) -> None:
        """Start a component, at other ports where somebody else was quicker."""
        for attempt in range(1, _PORT_TRIES + 1):
            life = await self._begin(name)
            try:
                await self._until_ready(life)
            except FleetError:
                taken = _PORT_TAKEN in life.program.tail(_PORT_TAKEN_LINES)
                ended = life.program.ended.is_set()
                if not (taken and ended and self._ports[name].movable) or attempt == _PORT_TRIES:
                    raise
                _log.warning("%s found its port taken; it gets another", name)
                self._ports[name].move()
            else:
                self._ready[name].set()
                return

    async def _begin(self, name: str) -> "_Life":
        """Begin another life of a component.

        Raises:
            FleetError: the last one survives SIGKILL, or its folder cannot be written.
        """
        assert self._root is not None  # noqa: S101 - it was made
        number = 1
        if name in self._lives:
            self._lives[name].program.check_gone()  # not a second one beside it, on the same device
            number += self._lives[name].number
        deployment = self._plan({name: number})
        component = next(part for part in deployment.components if part.name == name)
        folder = self._root / f"{name}-{number}"
        secrets: list[str] = []
        environment = _inherited(deployment.inherit) | _texts(component.environment, secrets)
        try:
            folder.mkdir()
            for file, content in component.files.items():
                _write_secretly(folder / file, json.dumps(_texts(content, secrets)))
        except OSError as error:
            raise FleetError(f"{name} cannot have its folder {folder}: {error}") from error
        program = Program(
            name,
            component.argv,
            environment=environment,
            folder=folder,
            log=folder / "log.txt",
            grace_s=self._stop_timeout_s,
        )
        life = _Life(component, program, number=number, folder=folder, secrets=secrets)
        self._lives[name] = life
        self._group.start_soon(self._keep, life)
        await program.started.wait()
        if program.pid is not None:
            self._observe(ComponentStarted(component=name, pid=program.pid, log=str(program.log)))
        return life

    async def _keep(self, life: "_Life") -> None:
        """Run a life to its end, and take all others down where it ended by itself."""
        program, name = life.program, life.component.name

        async def watch() -> None:
            await program.ended.wait()
            if life.watched:
                self._lost(life)

        try:
            with life.scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(watch)
                    await program.keep()
        except* FleetError as errors:  # processes survive SIGKILL: nothing more can be done
            _log.error("%s", errors.exceptions[0])
        finally:
            life.forget_files()
            self._observe(ComponentEnded(component=name, status=program.status))

    def _lost(self, life: "_Life") -> None:
        """A component that served has ended, and nobody asked for it."""
        if self._on_exit == "leave" and life.component.worker and self._served:
            _log.warning("%s", life.report())
            return
        if self._failure is None:
            self._failure = FleetError(f"{life.report()}\nEverything else was stopped.")
        if self._body is not None:
            self._body.cancel()

    async def _until_ready(self, life: "_Life") -> None:
        """Return when the component serves.

        Raises:
            FleetError: it ended, or did not serve in time.
        """
        program = life.program
        serves = False

        async def look() -> None:
            nonlocal serves
            with anyio.move_on_after(self._start_timeout_s):
                while not await self._answers(life):  # noqa: ASYNC110 - nobody tells when it does
                    await anyio.sleep(_LOOK_S)
                serves = True
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(look)
            await program.ended.wait()
            group.cancel_scope.cancel()
        if program.ended.is_set():  # also where somebody else answered for it
            await program.gone.wait()
            raise FleetError(life.report())
        if not serves:
            life.scope.cancel()
            await program.gone.wait()
            raise FleetError(
                f"{life.component.name} did not serve within start_timeout_s="
                f"{self._start_timeout_s:g}; {life.log_end()}"
            )
        life.watched = True
        life.forget_files()
        self._observe(ComponentReady(component=life.component.name, url=life.component.url))

    async def _answers(self, life: "_Life") -> bool:
        """Whether it says that it serves, and nobody else says so for it."""
        assert self._transport is not None  # noqa: S101 - it was made
        component = life.component
        call = HTTPCall(method="GET", path=component.ready)
        with anyio.move_on_after(_LOOK_LIMIT_S), suppress(TransportError):
            reply = await self._transport.send(component.url, call)
            port = urlsplit(component.url).port
            return reply.ok and port is not None and not life.program.is_not_at(port)
        return False


class _Life:
    """One life of a component."""

    def __init__(
        self,
        component: Component,
        program: Program,
        *,
        number: int,
        folder: Path,
        secrets: Sequence[str],
    ) -> None:
        self.component = component
        self.program = program
        self.number = number
        self.scope = anyio.CancelScope()
        self.watched = False
        """Whether it served, and its end is nobody's wish."""
        self._folder = folder
        self._secrets = [secret for secret in secrets if len(secret) >= _KEY_SHOWN_FROM]

    def serves(self, url: str) -> bool:
        """Whether it is the worker at that URL."""
        return self.component.worker and self.component.url == url

    def report(self) -> str:
        """How it ended and the last lines of its log."""
        program = self.program
        pid = "" if program.pid is None else f" (pid {program.pid})"
        held = _PORT_TAKEN in program.tail(_PORT_TAKEN_LINES)
        why = "; somebody else listens at a port that it needs" if held else ""
        return (
            f"{self.component.name}{pid} at {self.component.url} {program.fate}{why}; "
            f"{self.log_end()}"
        )

    def log_end(self) -> str:
        """The last lines of its log, keys masked."""
        tail = self.program.tail(hide=self._secrets)
        return f"{self.program.log} ends:\n{tail}" if tail else f"{self.program.log} is empty"

    def forget_files(self) -> None:
        """Remove the files with keys, which it has read."""
        for name in self.component.files:
            try:
                (self._folder / name).unlink(missing_ok=True)
            except OSError as error:  # no reason to end what serves
                _log.error("a file with keys of %s stays: %s", self.component.name, error)


class _Ports:
    """The ports of one component, held."""

    def __init__(self, need: Need) -> None:
        self._need = need
        self._held: dict[str, _Held] = {}
        try:
            for name, wish in need.ports.items():
                self._held[name] = _hold(need, wish)
        except BaseException:
            self.release()
            raise

    @property
    def numbers(self) -> dict[str, int]:
        """The ports by what they are for."""
        return {name: held.number for name, held in self._held.items()}

    @property
    def movable(self) -> bool:
        """Whether some port was not asked for by its number."""
        return any(wish.number is None for wish in self._need.ports.values())

    def move(self) -> None:
        """Give up those that were not asked for by their numbers, for others."""
        for name, wish in self._need.ports.items():
            if wish.number is None:
                other = _hold(self._need, wish)  # before the old one is free again
                self._held[name].close()
                self._held[name] = other

    def release(self) -> None:
        """Hold them no longer."""
        for held in self._held.values():
            held.close()


class _Held:
    """A port that is bound and not listened at.

    As long as it is there, the kernel gives the port to nobody, neither to listen nor to connect
    from. Only who names the port and sets SO_REUSEADDR can listen there, as servers do. Another
    launch could hold it likewise, until one of the two servers listens: the name beside it is what
    only one of them can have. It is of the same reach as the port, and gone with its process.
    """

    def __init__(self, host: str, number: int | None) -> None:
        """Hold that port, or one that the kernel gives.

        Raises:
            OSError: somebody else has it.
        """
        self._bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._claim = socket.socket(socket.AF_UNIX)
        try:
            if number is not None:  # connections of its last owner may linger there
                self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._bound.bind((host, number or 0))  # without the option at none that is held
            self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._be_alone()
        except BaseException:
            self.close()
            raise

    def _be_alone(self) -> None:
        if sys.platform != "linux":
            return  # names that are in no folder are Linux's
        address = self._bound.getsockname()
        try:
            self._claim.bind(f"\0genapi.launch/{address[0]}/{address[1]}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise OSError(error.errno, "another launch holds it") from None
            raise

    @property
    def number(self) -> int:
        """The port."""
        number: int = self._bound.getsockname()[1]
        return number

    def close(self) -> None:
        """Hold it no longer."""
        self._bound.close()
        self._claim.close()


def _hold(need: Need, wish: PortWish) -> _Held:
    """A port as it is wished for.

    Raises:
        FleetError: there is none.
        ConfigError: the host can be none.
    """
    numbers: Iterable[int | None] = [wish.number]
    if wish.number is None and wish.below is not None:
        numbers = SystemRandom().sample(range(_LOWEST_PORT, wish.below), 100)
    reason = "none is free"
    for number in numbers:
        try:
            return _Held(need.host, number)
        except OSError as error:
            reason = error.strerror or str(error)
        except TypeError as error:
            raise ConfigError(f"{need.component}: host={need.host!r} is none: {error}") from None
    wanted = "a port" if wish.number is None else f"port {wish.number}"
    raise FleetError(
        f"{need.component} cannot have {wanted} of {need.host} ({reason}); where somebody else "
        "listens there, stop it or let the kernel give a port"
    )


def _new_folder(parent: Path, name: str) -> Path:
    """The first of `name-1`, `name-2`... that there was not."""
    for number in count(1):
        folder = parent / f"{name}-{number}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError  # pragma: no cover - the numbers do not end


def _place(root: Path, name: str, life: int, ports: Mapping[str, int]) -> Place:
    return Place(folder=str(root / f"{name}-{life}"), ports=ports, shared=str(root / "shared"))


def _absolute(text: str) -> str:
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # the home of nobody
        return text
    return str(path.absolute()) if path.exists() else text


def _inherited(more: Sequence[str]) -> dict[str, str]:
    """What components get of this process's variables."""
    return {"PYTHONUNBUFFERED": "1"} | {  # what is said before a crash is in the log
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED or name in more or name.startswith(_INHERITED_PREFIXES)
    }


def _texts(values: Mapping[str, str | Key], secrets: list[str]) -> dict[str, str]:
    """The values with keys looked up; what is found is added to `secrets`.

    Raises:
        ConfigError: a key is not set, or cannot be read.
    """
    found = {}
    for name, value in values.items():
        if isinstance(value, Key):
            find = looked_up if isinstance(value, HiddenText) else resolve
            text = find(value, environment=os.environ)
            if text is None:  # a server that is started without its key is open to everybody
                raise ConfigError(f"{name}: {value!r} holds no key; set it, or leave the field out")
            if "\0" in text:
                raise ConfigError(f"{name}: {value!r} holds a NUL, which no program can be given")
            # A log may show it line by line.
            secrets += [text, *map(str.strip, text.splitlines())]
            found[name] = text
        else:
            found[name] = value
    return found


def _write_secretly(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
