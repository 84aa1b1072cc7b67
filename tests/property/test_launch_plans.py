"""Command lines for whatever is configured: nothing is lost or said twice, no key shows."""

import json
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genapi.providers import sglang
from genapi.types.launch import Deployment
from tests.support.launch_plans import KINDS, planned, texts

NAMES = st.text("bcdfghjklmnpqrstvwxz", min_size=6, max_size=10)
"""Without vowels: no flag of these is called like a secret."""
SECRETS = st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", min_size=16, max_size=24)
PORTS = st.lists(st.integers(1024, 19999), min_size=3, max_size=3, unique=True)

COMMON: dict[str, st.SearchStrategy[Any]] = {
    "model": NAMES.map("m-{}/x".format),
    "model_name": NAMES.map("n-{}".format),
    "python": NAMES.map("/py-{}/python".format),
    "devices": st.lists(st.integers(100, 999), min_size=3, max_size=3, unique=True).map(
        lambda numbers: tuple(map(str, numbers))
    ),
    "tensor_parallel_size": st.integers(20000, 20100),
    "dtype": NAMES.map("d-{}".format),
    "max_model_len": st.integers(300000, 400000),
    "flags": NAMES.map(lambda text: (f"--x{text}=y-{text}",)),
    "environment": NAMES.map(lambda text: {"MINE": f"e-{text}"}),
}
SOME = st.fixed_dictionaries(
    {"model": COMMON["model"]},
    optional={name: value for name, value in COMMON.items() if name not in ("devices", "model")},
)
# The flag that each field is said by, where it is not an argument as a whole or a variable.
FLAGS = {
    "vllm": {"dtype": "dtype", "max_model_len": "max-model-len", "model": "model"},
    "sglang": {"dtype": "dtype", "max_model_len": "context-length", "model": "model-path"},
    "dynamo": {"dtype": "dtype", "max_model_len": "max-model-len", "model": "model"},
}


def workers_of(deployment: Deployment) -> list[Any]:
    return [component for component in deployment.components if component.worker]


@pytest.mark.parametrize("kind", KINDS)
@given(fields=st.fixed_dictionaries(COMMON), ports=PORTS)
def test_every_field_is_said_once_to_each_worker(
    kind: str, fields: dict[str, Any], ports: list[int]
) -> None:
    config = KINDS[kind](workers=3, ports=tuple(ports), **fields)
    deployment = planned(config)
    for number, worker in enumerate(workers_of(deployment)):
        flags = [argument.partition("=") for argument in worker.argv if argument.startswith("--")]
        names = [name for name, _, _ in flags]
        assert len(set(names)) == len(names)
        said = {name.removeprefix("--"): value for name, _, value in flags}
        for field, flag in FLAGS[kind].items():
            assert said[flag] == str(fields[field])
        assert said["served-model-name"] == fields["model_name"]
        assert said["tensor-parallel-size"] == str(fields["tensor_parallel_size"])
        assert worker.argv[0] == fields["python"]
        assert worker.argv[-1] == fields["flags"][0]
        variables = texts(worker.environment)
        assert variables["MINE"] == fields["environment"]["MINE"]
        assert variables["CUDA_VISIBLE_DEVICES"] == fields["devices"][number]
        place = said.get("port") or variables["DYN_SYSTEM_PORT"]
        assert int(place) == ports[number]
        assert worker.url == f"http://127.0.0.1:{ports[number]}"
    assert deployment.fleet.model == fields["model_name"]


@pytest.mark.parametrize("kind", KINDS)
@given(fields=SOME)
def test_what_is_not_configured_is_not_said(kind: str, fields: dict[str, Any]) -> None:
    for worker in workers_of(planned(KINDS[kind](**fields))):
        said = [argument for argument in worker.argv if "None" in argument or "=()" in argument]
        assert said == []
        assert any(argument.startswith("--dtype") for argument in worker.argv) == (
            "dtype" in fields
        )
        assert "CUDA_VISIBLE_DEVICES" not in worker.environment


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_no_key_is_on_a_command_line_or_in_anything_that_is_shown(
    kind: str, data: st.DataObject
) -> None:
    names = [name for name in KINDS[kind].model_fields if name.endswith("api_key")]
    secrets = {name: data.draw(SECRETS) for name in names}
    token = data.draw(SECRETS)
    more = {"gateway": sglang.Gateway()} if kind == "sglang" else {}
    config = KINDS[kind](model="m", workers=2, environment={"HF_TOKEN": token}, **secrets, **more)
    deployment = planned(config)
    for secret in (*secrets.values(), token):
        for component in deployment.components:
            assert secret not in shlex.join(component.argv)
        for shown in (config, deployment, deployment.fleet):
            assert secret not in str(shown)
            assert secret not in repr(shown)
    # Each is where the program reads it.
    held = [
        json.dumps([texts(c.environment), *(texts(content) for content in c.files.values())])
        for c in deployment.components
    ]
    assert all(token in each for each in held)
    for secret in secrets.values():
        assert sum(secret in each for each in held) >= 2


@pytest.mark.parametrize("kind", KINDS)
@given(fields=SOME)
def test_the_same_configuration_is_the_same_deployment(kind: str, fields: dict[str, Any]) -> None:
    assert planned(KINDS[kind](**fields)) == planned(KINDS[kind](**fields))
