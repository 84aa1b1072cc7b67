"""Command lines and environments of SGLang servers, and of a gateway in front of them.

SGLang reads its keys from no variable: they go into a file for `--config`, which is written as two
arguments because SGLang looks for the word alone. The gateway (smg) reads its key from its
command line only: a line of Python puts it there from a variable, after the process has started,
where no list of processes shows it.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import model_validator

from genapi.providers.shapes.launch import (
    GivenKey,
    LaunchConfig,
    flags_of,
    held,
    refuse_flags,
)
from genapi.types.address import host_port, url_of
from genapi.types.base import Value
from genapi.types.config import FleetConfig, Key, Topology
from genapi.types.launch import Component, Deployment, Need, Place, PortNumber, PortWish

__all__ = ("Gateway", "Launch")

_KEYS_FILE = "keys.yaml"  # JSON is YAML; SGLang goes by the ending
_GATEWAY = "gateway"
_GATEWAY_KEY = "GENAPI_GATEWAY_KEY"
_START_GATEWAY = (
    "import os, sys; from smg.cli import main; "
    f"key = os.environ.pop({_GATEWAY_KEY!r}, None); "
    "sys.argv[1:1] = ['launch']; "
    "sys.argv += [f'--api-key={key}'] if key else []; "
    "sys.exit(main())"
)
_FIELDS = {
    "admin-api-key": "admin_api_key=",
    "api-key": "api_key=",
    "config": "flags=",
    "context-length": "max_model_len=",
    "dtype": "dtype=",
    "host": "host=",
    "model": "model=",
    "model-path": "model=",
    "port": "ports=",
    "served-model-name": "model_name=",
    "tensor-parallel-size": "tensor_parallel_size=",
    "tp": "tensor_parallel_size=",
    "tp-size": "tensor_parallel_size=",
}
_GATEWAY_FIELDS = {
    "api-key": "api_key= of the launch",
    "host": "host= of the launch",
    "policy": "policy=",
    "port": "port=",
    "prometheus-host": "host= of the launch",
    "prometheus-port": "metrics_port=",
    "worker-urls": "workers= of the launch",
}


class Gateway(Value):
    """A gateway (smg) that requests go through.

    Attributes:
        python: the interpreter of the gateway's environment; None = that of the servers.
        port: where it listens; None = the kernel gives a port.
        metrics_port: where its metrics are; None = the kernel gives a port.
        policy: how it chooses a worker.
        flags: further flags, `--name=value` or `--name`.
    """

    python: str | None = None
    port: PortNumber | None = None
    metrics_port: PortNumber | None = None
    policy: str = "round_robin"
    flags: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _flags_of_one_s_own(self) -> Self:
        refuse_flags(self.flags, fields=_GATEWAY_FIELDS)
        return self


class Launch(LaunchConfig):
    """SGLang servers of one model, with or without a gateway in front.

    The target is `sglang://HOST:PORT,HOST:PORT`, or with a gateway
    `sglang://GATEWAY:PORT?workers=HOST:PORT,HOST:PORT`.

    Attributes:
        gateway: the gateway that requests go through; None = they go to the servers.
        api_key: asked of requests, and of administration where there is no other key.
        admin_api_key: asked of administration alone.
    """

    gateway: Gateway | None = None
    api_key: GivenKey = None
    admin_api_key: GivenKey = None

    @property
    def provider(self) -> Literal["sglang"]:
        """The provider of the fleet."""
        return "sglang"

    @model_validator(mode="after")
    def _flags_of_one_s_own(self) -> Self:
        refuse_flags(self.flags, fields=_FIELDS)
        return self

    @property
    def needs(self) -> tuple[Need, ...]:
        """One port for each worker, and two for the gateway."""
        workers = self.worker_needs()
        if self.gateway is None:
            return workers
        ports = {
            "http": PortWish(number=self.gateway.port),
            "metrics": PortWish(number=self.gateway.metrics_port),
        }
        return (*workers, Need(component=_GATEWAY, host=self.host, ports=ports))

    def plan(self, places: Mapping[str, Place]) -> Deployment:
        """The servers, and the gateway if there is one, at these places."""
        names = self.worker_names
        addresses = [host_port(self.host, places[name].ports["http"]) for name in names]
        components = [self._server(number, name, places[name]) for number, name in enumerate(names)]
        target, admin_key = f"sglang://{','.join(addresses)}", held(self.admin_api_key)
        if self.gateway is not None:
            urls = [component.url for component in components]
            place = places[_GATEWAY]
            components.append(self._gateway(self.gateway, place, names=names, urls=urls))
            front = host_port(self.host, place.ports["http"])
            target = f"sglang://{front}?workers={','.join(addresses)}"
            # The servers are other origins than the gateway, and these are the very servers.
            admin_key = admin_key or held(self.api_key)
        return Deployment(
            components=tuple(components),
            fleet=FleetConfig(
                target=target,
                model=self.served_name,
                api_key=held(self.api_key),
                admin_api_key=admin_key,
                expect=Topology(workers=self.workers),
            ),
            inherit=self.inherit,
        )

    def _server(self, number: int, name: str, place: Place) -> Component:
        port = place.ports["http"]
        keys = {"api-key": held(self.api_key), "admin-api-key": held(self.admin_api_key)}
        given = {name: key for name, key in keys.items() if key is not None}
        config = ("--config", f"{place.folder}/{_KEYS_FILE}") if given else ()
        flags = flags_of(
            {
                "model-path": self.model,
                "served-model-name": self.served_name,
                "host": self.host,
                "port": port,
                "tensor-parallel-size": self.tensor_parallel_size,
                "dtype": self.dtype,
                "context-length": self.max_model_len,
            }
        )
        # A file of this life alone, where the ranks' own store would listen at every interface.
        meeting = f"file://{place.folder}/rendezvous"
        own: dict[str, str | Key] = {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": meeting}
        return Component(
            name=name,
            argv=(self.python, "-m", "sglang.launch_server", *config, *flags, *self.flags),
            environment=self.variables(own, worker=number),
            files={_KEYS_FILE: given} if given else {},
            url=url_of(self.host, port),
            ready="/ready",  # /health generates
        )

    def _gateway(
        self, gateway: Gateway, place: Place, *, names: Sequence[str], urls: Sequence[str]
    ) -> Component:
        flags = flags_of(
            {
                "host": self.host,
                "port": place.ports["http"],
                "prometheus-host": self.host,
                "prometheus-port": place.ports["metrics"],
                "policy": gateway.policy,
            }
        )
        given = held(self.api_key)
        key = {} if given is None else {_GATEWAY_KEY: given}
        python = gateway.python or self.python
        return Component(
            name=_GATEWAY,
            argv=(python, "-c", _START_GATEWAY, *flags, *gateway.flags, "--worker-urls", *urls),
            environment={**key, **self.environment},
            url=url_of(self.host, place.ports["http"]),
            ready="/readiness",
            after=tuple(names),
            worker=False,
        )
