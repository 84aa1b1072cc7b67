"""What launching an engine's servers has in common: the fields, and how a command line is written.

Flags are written `--name=value`, each once. What genapi sets, and what may be a secret (`secrets`),
is refused among a user's own flags. A variable that may be one is held as a `HiddenText`.
The rule of this file: no key on a command line, none in anything that can be shown.
"""

import json
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from genapi.providers.shapes.secrets import holds_secret, may_be_secret
from genapi.types.base import Value
from genapi.types.config import HiddenText, Key
from genapi.types.launch import Need, PortNumber, PortWish

__all__ = (
    "Count",
    "GivenKey",
    "LaunchConfig",
    "flags_of",
    "held",
    "refuse_flags",
    "refuse_secrets",
)

Count = Annotated[int, Field(ge=1, strict=True)]


def held(key: str | Key | None) -> Key | None:
    """A key that was given, as it is held."""
    return Key(key) if isinstance(key, str) else key


GivenKey = Annotated[str | Key | None, AfterValidator(held)]
"""A key as users give it: its text, or where it is. What is held is a `Key`."""

_KEY_FLAGS = ("admin-api-key", "api-key", "hf-token", "oracle-password", "tenant-api-key")
_ANY_ADDRESS = ("", "0.0.0.0", "::", "[::]")  # noqa: S104 - refused


class LaunchConfig(Value):
    """What every engine's launch has.

    Attributes:
        model: the model's folder, or its name on a hub.
        model_name: the name it is served by; None = `model`.
        workers: how many servers.
        python: the interpreter of the engine's environment.
        host: the address of this machine that everything listens at and is reached by.
        ports: the workers' ports; empty = the kernel gives them.
        devices: `CUDA_VISIBLE_DEVICES` of each worker; empty = inherited.
        tensor_parallel_size: ranks of one worker.
        dtype: of weights and activations; None = the engine decides.
        max_model_len: longest prompt plus output in tokens; None = the model's.
        flags: further flags of every worker, `--name=value` or `--name`.
        environment: further variables of every component. One that may be a secret, by its name or
            by what is in it, is held as a key is: `env:NAME` and `file:PATH` are looked up.
        inherit: variables of this process that components get besides the usual ones.
    """

    model: Annotated[str, Field(min_length=1)]
    model_name: Annotated[str, Field(min_length=1)] | None = None
    workers: Count = 1
    python: str = Field(default_factory=lambda: sys.executable)
    host: str = "127.0.0.1"
    ports: tuple[PortNumber, ...] = ()
    devices: tuple[str, ...] = ()
    tensor_parallel_size: Count = 1
    dtype: str | None = None
    max_model_len: Count | None = None
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str | Key] = {}
    inherit: tuple[str, ...] = ()

    @field_validator("environment")
    @classmethod
    def _keys_hidden(cls, environment: Mapping[str, str | Key]) -> Mapping[str, str | Key]:
        return {name: _hidden(name, value) for name, value in environment.items()}

    @field_validator("model")
    @classmethod
    def _no_flag(cls, model: str) -> str:
        if model.startswith("-"):
            raise ValueError(f"model={model!r} begins like a flag")
        refuse_secrets(model, "model=")
        return model

    @field_validator("host")
    @classmethod
    def _reachable(cls, host: str) -> str:
        if host in _ANY_ADDRESS:
            raise ValueError(f"host={host!r} is no address to be reached by; name one of them")
        return host

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        count = len(self.worker_names)
        for name, given in (("ports", self.ports), ("devices", self.devices)):
            if given and len(given) != count:
                raise ValueError(
                    f"{name}={given!r} for {count} workers: give one for each, or none"
                )
        wishes = (wish for need in self.needs for wish in need.ports.values())
        given_ports = Counter(wish.number for wish in wishes if wish.number is not None)
        twice = [port for port, times in given_ports.items() if times > 1]
        if twice:
            raise ValueError(f"ports {twice} are given twice; one component listens at each")
        return self

    @property
    @abstractmethod
    def needs(self) -> tuple[Need, ...]:
        """Every component, by what it needs."""

    @property
    def worker_names(self) -> tuple[str, ...]:
        """The workers of all kinds, in rank order."""
        return tuple(f"worker{number}" for number in range(self.workers))

    @property
    def served_name(self) -> str:
        """The name that requests have to give."""
        return self.model_name or self.model

    def located(self, find: Callable[[str], str]) -> Self:
        """The same with each path as `find` gives it."""
        python = find(self.python) if "/" in self.python else self.python
        return self.model_copy(update={"model": find(self.model), "python": python})

    def worker_needs(self, *, below: int | None = None) -> tuple[Need, ...]:
        """What the workers need: one port each."""
        names = self.worker_names
        ports = self.ports or (None,) * len(names)
        return tuple(
            Need(component=name, host=self.host, ports={"http": PortWish(number=port, below=below)})
            for name, port in zip(names, ports, strict=True)
        )

    def variables(self, own: Mapping[str, str | Key], *, worker: int) -> dict[str, str | Key]:
        """The variables of a worker: the engine's, its devices, then the user's."""
        devices = {"CUDA_VISIBLE_DEVICES": self.devices[worker]} if self.devices else {}
        return {**own, **devices, **self.environment}


def _hidden(name: str, value: str | Key) -> str | Key:
    if isinstance(value, Key):
        return HiddenText(value.reveal())
    is_secret = may_be_secret(name, value) or holds_secret(value)
    return HiddenText(value) if is_secret else value


def flags_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """`--name=value` of each; True is `--name`, None and False nothing, a mapping JSON."""
    return tuple(
        f"--{name}" if value is True else f"--{name}={_text(value)}"
        for name, value in values.items()
        if value is not None and value is not False
    )


def refuse_flags(flags: Iterable[str], *, fields: Mapping[str, str]) -> None:
    """Raise `ValueError` for what may hold a secret, or for a flag that a field is there for.

    Args:
        flags: the user's.
        fields: the field by the flag that it sets.
    """
    for flag, following in pairwise([*flags, "-"]):
        name, equals, value = flag.lstrip("-").partition("=")
        if not flag.startswith("-"):
            refuse_secrets(flag, "what follows a flag")
            continue
        refuse_secrets(value, f"flag '--{name}'")
        name = name.replace("_", "-")
        held_by = value if equals else None if following.startswith("-") else following
        if may_be_secret(name, held_by) or _abbreviates(name, _KEY_FLAGS):
            raise ValueError(
                f"flag '--{name}' would show a secret to whoever lists processes; use the fields "
                "for keys, or a variable in environment="
            )
        for taken, field in fields.items():
            if name == taken or _abbreviates(name, (taken,)):
                raise ValueError(f"flag '--{name}' is genapi's to set; use {field}")


def refuse_secrets(text: str, what: str) -> None:
    """Raise `ValueError` for a part of a command line that has a secret in it.

    Args:
        text: the part.
        what: what a message calls it; the text itself is in none.
    """
    if holds_secret(text):
        raise ValueError(
            f"{what} holds a URL with user info, a header with a key or a field that is named like "
            "a secret, which would show it to whoever lists processes; use a variable in "
            "environment="
        )


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


def _abbreviates(name: str, flags: Iterable[str]) -> bool:
    # argparse takes any beginning that is of one flag alone.
    return bool(name) and any(flag.startswith(name) and flag != name for flag in flags)
