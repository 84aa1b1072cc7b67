"""What a launch consists of: components with their command lines, environments and ports.

The rule of this file: a deployment can be shown. Keys are in it as `Key` only, which never shows a
literal, and no command line holds one.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Protocol, Self

from pydantic import Field

from genapi.errors import ConfigError
from genapi.shown import shortened
from genapi.types.base import Value
from genapi.types.config import FleetConfig, Key, base_url

__all__ = ("Component", "Deployment", "Launchable", "Need", "Place", "PortWish")

PortNumber = Annotated[int, Field(ge=1, le=65535, strict=True)]
_LONGEST = 80


class PortWish(Value):
    """A port that a component listens at.

    Attributes:
        number: the port; None = one that the kernel gives.
        below: the program cannot read a number that is not below this.
    """

    number: PortNumber | None = None
    below: int | None = None


class Need(Value):
    """A component, by what it needs before its command line can be written.

    Attributes:
        component: its name, unique in the deployment.
        host: the address it listens at.
        ports: its ports by what they are for.
    """

    component: str
    host: str
    ports: Mapping[str, PortWish]


class Place(Value):
    """Where one life of a component runs.

    Attributes:
        folder: its working folder, of this life alone.
        ports: its ports by what they are for.
        shared: a folder that every component of the deployment has.
    """

    folder: str
    ports: Mapping[str, int]
    shared: str


class Component(Value):
    """One program of a deployment.

    Attributes:
        name: unique in the deployment; `worker0`, `gateway`.
        argv: its command line.
        environment: its variables besides those that are inherited; a `Key` is looked up when
            the program starts.
        files: JSON files in its folder by name, readable by nobody else; a `Key` is looked up
            when they are written.
        url: its base URL.
        ready: the path that answers 200 once it serves.
        after: components that have to be ready before it starts.
        worker: whether the URL is a worker's, which can be restarted alone.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str | Key] = {}
    files: Mapping[str, Mapping[str, str | Key]] = {}
    url: str
    ready: str
    after: tuple[str, ...] = ()
    worker: bool = True

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.url}, ready when GET {self.ready} says 200"]
        if self.after:
            lines.append(f"  starts after {', '.join(self.after)}")
        lines += [f"  {name}={_shown(value)}" for name, value in self.environment.items()]
        for name, content in self.files.items():
            shown = {key: _shown(value) for key, value in content.items()}
            lines.append(f"  file {name} (mode 600): {json.dumps(shown)}")
        lines.append(f"  {shlex.join(self.argv)}")
        return "\n".join(lines)


class Deployment(Value):
    """What a launch starts, and the fleet that it is then.

    `str` shows all of it, keys masked.
    """

    components: tuple[Component, ...]
    fleet: FleetConfig
    inherit: tuple[str, ...] = ()

    def check(self, needs: Iterable[Need]) -> None:
        """Find out what no system can start, whatever is installed there. Looks no key up.

        Args:
            needs: what the components got their places for.

        Raises:
            ConfigError: names the component, the field and the value.
        """
        names = [component.name for component in self.components]
        placed = [need.component for need in needs]
        for name in (*names, *placed):
            if names.count(name) != 1 or placed.count(name) != 1:
                raise ConfigError(
                    f"component {name!r} is {names.count(name)} times among the components and "
                    f"{placed.count(name)} times among their needs; name each once in both"
                )
        for component in self.components:
            for what, value, why in _unfit(component):
                raise ConfigError(f"{component.name}: {what}{shortened(value, _LONGEST)} {why}")
            base_url(component.url, scheme="http")
            for name in component.after:
                if name not in names:
                    raise ConfigError(
                        f"{component.name}: after={component.after!r} names {name!r}, which is no "
                        f"component; there are {', '.join(names)}"
                    )
        try:
            TopologicalSorter({part.name: part.after for part in self.components}).prepare()
        except CycleError as error:
            round_ = " after ".join(error.args[1])
            raise ConfigError(
                f"nobody of these can start first: {round_}; leave one out of after="
            ) from None

    def __str__(self) -> str:
        inherited = ", ".join(self.inherit)
        head = f"fleet {self.fleet.target}" + (f", inheriting {inherited}" if inherited else "")
        return "\n\n".join([head, *map(str, self.components)])


class Launchable(Protocol):
    """What can be launched: `genapi.providers.vllm.Launch` and its like, or a user's own."""

    @property
    def provider(self) -> str:
        """The provider of the fleet."""
        ...

    @property
    def needs(self) -> tuple[Need, ...]:
        """Every component, by what it needs."""
        ...

    def located(self, find: Callable[[str], str]) -> Self:
        """The same with each path as `find` gives it: components run in folders of their own."""
        ...

    def plan(self, places: Mapping[str, Place]) -> Deployment:
        """The command lines and environments of components at these places. Pure.

        Raises:
            ConfigError: it cannot work.
        """
        ...


def _unfit(component: Component) -> Iterator[tuple[str, str, str]]:
    """What of a component cannot be: the field, its value where it may be shown, and why."""
    for name in (component.name, *component.files):
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            yield "", repr(name), "is to be the name of a folder or file; leave out / and NUL"
    if not component.argv or not component.argv[0]:
        yield "argv=", repr(component.argv), "names no program (python= of a launch)"
    for number, argument in enumerate(component.argv):
        yield from _untold(f"argv[{number}]=", argument)
    for name, value in component.environment.items():
        if not name or "=" in name:
            yield "environment: ", repr(name), "is no name of a variable; leave out ="
        yield from _untold("environment: ", name)
        if not isinstance(value, Key):
            yield from _untold(f"environment[{name!r}]=", value)
        elif not value.is_reference:
            yield from (
                (what, "", why) for what, _, why in _untold(f"the key {name!r}", value.reveal())
            )


def _untold(what: str, text: str) -> Iterator[tuple[str, str, str]]:
    """Why no program can be given a text."""
    if "\0" in text:
        yield what, repr(text), "holds a NUL, which no program can be given"
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        yield what, repr(text), "holds half of a character (a surrogate), which no program can get"


def _shown(value: str | Key) -> str:
    return repr(value) if isinstance(value, Key) else shlex.quote(value)
