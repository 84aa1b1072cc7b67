"""Command lines and environments of vLLM servers.

A key goes through `VLLM_API_KEY`, which vLLM reads where no `--api-key` is given. The module is run
and not `vllm serve`, which looks for a distribution called vllm that builds for CPUs are not.
"""

from collections.abc import Mapping
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
from genapi.types.config import FleetConfig, Key, Topology
from genapi.types.launch import Component, Deployment, Need, Place

__all__ = ("Launch",)

_MODULE = "vllm.entrypoints.openai.api_server"
_FIELDS = {
    "api-key": "api_key=",
    "dtype": "dtype=",
    "enable-scale-out": "nothing: it is always on",
    "enforce-eager": "enforce_eager=",
    "host": "host=",
    "max-model-len": "max_model_len=",
    "model": "model=",
    "port": "ports=",
    "served-model-name": "model_name=",
    "tensor-parallel-size": "tensor_parallel_size=",
    "tp": "tensor_parallel_size=",
    "weight-transfer-config": "weight_backend=",
}


class Launch(LaunchConfig):
    """vLLM servers of one model, side by side: `vllm://HOST:PORT,HOST:PORT`.

    Attributes:
        weight_backend: the receiving end of weight transfers; None = no weight updates.
        enforce_eager: no CUDA graphs.
        api_key: asked of requests. vLLM leaves routes of administration open: a loopback address
            or a private network has to protect those.
    """

    weight_backend: str | None = "genapi_gloo"
    enforce_eager: bool = False
    api_key: GivenKey = None

    @property
    def provider(self) -> Literal["vllm"]:
        """The provider of the fleet."""
        return "vllm"

    @model_validator(mode="after")
    def _flags_of_one_s_own(self) -> Self:
        refuse_flags(self.flags, fields=_FIELDS)
        return self

    @property
    def needs(self) -> tuple[Need, ...]:
        """One port for each worker."""
        return self.worker_needs()

    def plan(self, places: Mapping[str, Place]) -> Deployment:
        """The servers at these places."""
        names = self.worker_names
        addresses = [host_port(self.host, places[name].ports["http"]) for name in names]
        return Deployment(
            components=tuple(
                self._server(number, name, places[name]) for number, name in enumerate(names)
            ),
            fleet=FleetConfig(
                target=f"vllm://{','.join(addresses)}",
                model=self.served_name,
                api_key=held(self.api_key),
                expect=Topology(workers=self.workers),
            ),
            inherit=self.inherit,
        )

    def _server(self, number: int, name: str, place: Place) -> Component:
        port = place.ports["http"]
        backend = None if self.weight_backend is None else {"backend": self.weight_backend}
        flags = flags_of(
            {
                "model": self.model,
                "served-model-name": self.served_name,
                "host": self.host,
                "port": port,
                "tensor-parallel-size": self.tensor_parallel_size,
                "dtype": self.dtype,
                "max-model-len": self.max_model_len,
                "enforce-eager": self.enforce_eager,
                "enable-scale-out": True,
                "weight-transfer-config": backend,
            }
        )
        own: dict[str, str | Key] = {"VLLM_SERVER_DEV_MODE": "1"}  # routes of administration
        key = held(self.api_key)
        if key is not None:
            own["VLLM_API_KEY"] = key
        return Component(
            name=name,
            argv=(self.python, "-m", _MODULE, *flags, *self.flags),
            environment=self.variables(own, worker=number),
            url=url_of(self.host, port),
            ready="/health",
        )
