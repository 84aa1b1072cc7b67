"""Command lines and environments of a Dynamo frontend and its vLLM workers.

Components find each other in a folder of the deployment's own: no etcd, no NATS, no variable
`DYN_*` of anybody else. Dynamo asks for no key anywhere; a loopback address or a private network
has to protect it.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from genapi.providers.dynamo.ranks import JOIN_ENDS_S
from genapi.providers.shapes.launch import (
    LaunchConfig,
    flags_of,
    refuse_flags,
    refuse_secrets,
)
from genapi.types.address import host_port, url_of
from genapi.types.config import FleetConfig, Key, Topology
from genapi.types.ids import Role
from genapi.types.launch import Component, Deployment, Need, Place, PortNumber, PortWish

__all__ = ("Launch",)

Some = Annotated[int, Field(ge=0, strict=True)]

_FRONTEND = "frontend"
_SYSTEM_PORT_END = 32768  # DYN_SYSTEM_PORT is read as a signed number of 16 bits
_NO_BROKER = "xsub=tcp://127.0.0.1:9 , xpub=tcp://127.0.0.1:9"
"""Events go nowhere. Without a broker their publishers listen at every interface."""
_FIELDS = {
    "disaggregation-mode": "prefill_workers= and decode_workers=",
    "dtype": "dtype=",
    "enable-rl": "nothing: it is always on",
    "endpoint": "namespace=",
    "enforce-eager": "enforce_eager=",
    "kv-transfer-config": "kv_transfer=",
    "max-model-len": "max_model_len=",
    "model": "model=",
    "namespace": "namespace=",
    "served-model-name": "model_name=",
    "tensor-parallel-size": "tensor_parallel_size=",
    "tp": "tensor_parallel_size=",
    "weight-transfer-config": "weight_backend=",
}
_FRONTEND_FIELDS = {
    "http-host": "host=",
    "http-port": "frontend_port=",
    "migration-limit": "nothing: a migrated reply has no version",
    "namespace": "namespace=",
    "router-mode": "router_mode=",
}


class Launch(LaunchConfig):
    """A Dynamo frontend with vLLM workers: `dynamo://HOST:PORT?discovery=PORT`.

    Workers are `workers` that do both, or `prefill_workers` and `decode_workers`. Their `ports` are
    those of administration, below 32768.

    Attributes:
        prefill_workers: workers that only read prompts.
        decode_workers: workers that only generate.
        namespace: Dynamo's name for the deployment.
        frontend_port: where requests go; None = the kernel gives a port.
        discovery_port: where workers are listed; None = the kernel gives a port.
        router_mode: how the frontend chooses a worker. `kv` needs the workers' events, which
            Dynamo publishes at every interface of the machine.
        frontend_flags: further flags of the frontend.
        kv_transfer: `--kv-transfer-config` of prefill and decode workers.
        weight_backend: the receiving end of weight transfers; None = no weight updates.
        enforce_eager: no CUDA graphs.
    """

    prefill_workers: Some = 0
    decode_workers: Some = 0
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9_-]+$")] = "dynamo"
    frontend_port: PortNumber | None = None
    discovery_port: PortNumber | None = None
    router_mode: Literal["round-robin", "random", "kv"] = "round-robin"
    frontend_flags: tuple[str, ...] = ()
    kv_transfer: Mapping[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    weight_backend: str | None = "genapi_gloo"
    enforce_eager: bool = False

    @property
    def provider(self) -> Literal["dynamo"]:
        """The provider of the fleet."""
        return "dynamo"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse_flags(self.flags, fields=_FIELDS)
        refuse_flags(self.frontend_flags, fields=_FRONTEND_FIELDS)
        refuse_secrets(json.dumps(dict(self.kv_transfer)), "kv_transfer=")
        if bool(self.prefill_workers) != bool(self.decode_workers):
            raise ValueError(
                f"prefill_workers={self.prefill_workers} with decode_workers="
                f"{self.decode_workers}: give both, or neither"
            )
        if self.prefill_workers and "workers" in self.model_fields_set:
            raise ValueError("workers= goes without prefill_workers= and decode_workers=")
        too_high = [port for port in self.ports if port >= _SYSTEM_PORT_END]
        if too_high:
            raise ValueError(f"ports {too_high} of workers are not below {_SYSTEM_PORT_END}")
        return self

    @property
    def worker_names(self) -> tuple[str, ...]:
        """The workers of all kinds, in rank order."""
        return tuple(self._roles)

    @property
    def _roles(self) -> dict[str, Role]:
        """The workers' roles by their names, in rank order."""
        counts = {Role.UNIFIED: self.workers}
        if self.prefill_workers:
            counts = {Role.PREFILL: self.prefill_workers, Role.DECODE: self.decode_workers}
        return {
            f"{'worker' if role is Role.UNIFIED else role.value}{number}": role
            for role, count in counts.items()
            for number in range(count)
        }

    @property
    def needs(self) -> tuple[Need, ...]:
        """The frontend's two ports, and one or two for each worker."""
        frontend = {
            "http": PortWish(number=self.frontend_port),
            "discovery": PortWish(number=self.discovery_port),
        }
        workers = self.worker_needs(below=_SYSTEM_PORT_END)
        if self.prefill_workers:
            side = {"side": PortWish()}
            workers = tuple(
                need.model_copy(update={"ports": {**need.ports, **side}}) for need in workers
            )
        return (Need(component=_FRONTEND, host=self.host, ports=frontend), *workers)

    def plan(self, places: Mapping[str, Place]) -> Deployment:
        """The frontend and the workers at these places."""
        roles, front = self._roles, places[_FRONTEND]
        where = host_port(self.host, front.ports["http"])
        return Deployment(
            components=(
                self._frontend(front),
                *(
                    self._worker(number, name, role, places[name])
                    for number, (name, role) in enumerate(roles.items())
                ),
            ),
            fleet=FleetConfig(
                target=f"dynamo://{where}?discovery={front.ports['discovery']}",
                model=self.served_name,
                expect=Topology(workers=len(roles), roles=Counter(roles.values())),
            ),
            inherit=self.inherit,
        )

    def _frontend(self, place: Place) -> Component:
        flags = flags_of(
            {
                "http-host": self.host,
                "http-port": place.ports["http"],
                "router-mode": self.router_mode,
                "migration-limit": 0,
            }
        )
        own = {
            "DYN_ENABLE_RL": "true",
            "DYN_RL_PORT": str(place.ports["discovery"]),
        }
        return Component(
            name=_FRONTEND,
            argv=(self.python, "-m", "dynamo.frontend", *flags, *self.frontend_flags),
            environment={**self._common(place), **own, **self.environment},
            url=url_of(self.host, place.ports["http"]),
            ready="/health",
            worker=False,
        )

    def _worker(self, number: int, name: str, role: Role, place: Place) -> Component:
        port, alone = place.ports["http"], role is Role.UNIFIED
        backend = None if self.weight_backend is None else {"backend": self.weight_backend}
        flags = flags_of(
            {
                "model": self.model,
                "served-model-name": self.served_name,
                "enable-rl": True,
                "disaggregation-mode": "agg" if alone else role.value,
                "kv-transfer-config": None if alone else dict(self.kv_transfer),
                "tensor-parallel-size": self.tensor_parallel_size,
                "dtype": self.dtype,
                "max-model-len": self.max_model_len,
                "enforce-eager": self.enforce_eager,
                "weight-transfer-config": backend,
            }
        )
        own: dict[str, str | Key] = {
            **self._common(place),
            "DYN_SYSTEM_PORT": str(port),
            "DYN_RL_INIT_WEIGHTS_TIMEOUT_S": f"{JOIN_ENDS_S:g}",
        }
        if not alone:
            own["VLLM_NIXL_SIDE_CHANNEL_HOST"] = self.host
            own["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(place.ports["side"])
        return Component(
            name=name,
            argv=(self.python, "-m", "dynamo.vllm", *flags, *self.flags),
            environment=self.variables(own, worker=number),
            url=url_of(self.host, port),
            ready="/health",
        )

    def _common(self, place: Place) -> dict[str, str | Key]:
        broker = {} if self.router_mode == "kv" else {"DYN_ZMQ_BROKER_URL": _NO_BROKER}
        hosts = ("HTTP", "SYSTEM", "TCP_RPC", "TCP_RESPONSE_STREAM", "EVENT_PLANE")
        return {
            "DYN_NAMESPACE": self.namespace,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": place.shared,
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",  # nobody asks any more
            "PYTHONHASHSEED": "0",  # workers have to hash a prefix alike
            **{f"DYN_{name}_HOST": self.host for name in hosts},
            **broker,
        }
