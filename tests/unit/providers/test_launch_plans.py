"""What is started, as values: command lines, environments, and the fleet that they make."""

import shlex
from typing import Any

import pytest
from pydantic import ValidationError

from genapi.providers import sglang, vllm
from genapi.providers.dynamo import Launch as DynamoLaunch
from genapi.types.config import Key
from genapi.types.ids import Role
from tests.support.launch_plans import KINDS, planned, texts

MODEL = "some/model"


def test_vllm_servers_get_what_requests_administration_and_transfers_need() -> None:
    config = vllm.Launch(
        model=MODEL,
        model_name="tiny",
        workers=2,
        python="/vllm/bin/python",
        ports=(8001, 8002),
        devices=("0,1", "2,3"),
        tensor_parallel_size=2,
        dtype="bfloat16",
        max_model_len=4096,
        enforce_eager=True,
        flags=("--seed=7",),
        environment={"OMP_NUM_THREADS": "1"},
        api_key="env:VLLM_KEY",
    )
    deployment = planned(config)
    assert [component.name for component in deployment.components] == ["worker0", "worker1"]
    second = deployment.components[1]
    assert shlex.join(second.argv) == (
        "/vllm/bin/python -m vllm.entrypoints.openai.api_server --model=some/model "
        "--served-model-name=tiny --host=127.0.0.1 --port=8002 --tensor-parallel-size=2 "
        "--dtype=bfloat16 --max-model-len=4096 --enforce-eager --enable-scale-out "
        """'--weight-transfer-config={"backend": "genapi_gloo"}' --seed=7"""
    )
    assert texts(second.environment) == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_API_KEY": "env:VLLM_KEY",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "OMP_NUM_THREADS": "1",
    }
    assert (second.url, second.ready, second.worker) == ("http://127.0.0.1:8002", "/health", True)
    fleet = deployment.fleet
    assert fleet.target == "vllm://127.0.0.1:8001,127.0.0.1:8002"
    assert (fleet.model, fleet.api_key) == ("tiny", Key("env:VLLM_KEY"))
    assert fleet.expect is not None
    assert fleet.expect.workers == 2


def test_sglang_servers_read_their_keys_from_a_file() -> None:
    config = sglang.Launch(
        model=MODEL, python="/sglang/bin/python", api_key="k-data", admin_api_key="env:ADMIN"
    )
    (server,) = planned(config).components
    assert shlex.join(server.argv) == (
        "/sglang/bin/python -m sglang.launch_server --config /run/worker0-1/keys.yaml "
        "--model-path=some/model --served-model-name=some/model --host=127.0.0.1 --port=20001 "
        "--tensor-parallel-size=1"
    )
    assert {name: texts(content) for name, content in server.files.items()} == {
        "keys.yaml": {"api-key": "k-data", "admin-api-key": "env:ADMIN"}
    }
    meeting = {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "file:///run/worker0-1/rendezvous"}
    assert texts(server.environment) == meeting
    assert server.ready == "/ready"
    without = planned(sglang.Launch(model=MODEL)).components[0]
    assert without.files == {}
    assert "--config" not in without.argv


def test_a_gateway_starts_after_the_servers_and_gets_the_requests() -> None:
    config = sglang.Launch(
        model=MODEL,
        workers=2,
        api_key="k-data",
        gateway=sglang.Gateway(
            python="/smg/bin/python", port=8000, policy="cache_aware", flags=("--log-level=warn",)
        ),
    )
    deployment = planned(config)
    *servers, gateway = deployment.components
    assert gateway.argv[:2] == ("/smg/bin/python", "-c")
    assert shlex.join(gateway.argv[3:]) == (
        "--host=127.0.0.1 --port=8000 --prometheus-host=127.0.0.1 --prometheus-port=20004 "
        "--policy=cache_aware --log-level=warn "
        "--worker-urls http://127.0.0.1:20001 http://127.0.0.1:20002"
    )
    assert gateway.after == ("worker0", "worker1")
    assert [component.worker for component in (*servers, gateway)] == [True, True, False]
    fleet = deployment.fleet
    assert fleet.target == "sglang://127.0.0.1:8000?workers=127.0.0.1:20001,127.0.0.1:20002"
    # The servers are another origin than the gateway, and take the key that they were given.
    assert (fleet.api_key, fleet.admin_api_key) == (Key("k-data"), Key("k-data"))


def test_a_dynamo_frontend_and_its_workers_find_each_other_in_a_folder_of_their_own() -> None:
    config = DynamoLaunch(
        model=MODEL, model_name="tiny", workers=2, python="/dyn/bin/python", frontend_port=8000
    )
    deployment = planned(config)
    frontend, first, second = deployment.components
    assert shlex.join(frontend.argv) == (
        "/dyn/bin/python -m dynamo.frontend --http-host=127.0.0.1 --http-port=8000 "
        "--router-mode=round-robin --migration-limit=0"
    )
    assert shlex.join(second.argv) == (
        "/dyn/bin/python -m dynamo.vllm --model=some/model --served-model-name=tiny --enable-rl "
        "--disaggregation-mode=agg --tensor-parallel-size=1 "
        """'--weight-transfer-config={"backend": "genapi_gloo"}'"""
    )
    shared = {
        "DYN_NAMESPACE": "dynamo",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": "/run/shared",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "PYTHONHASHSEED": "0",
        "DYN_HTTP_HOST": "127.0.0.1",
        "DYN_SYSTEM_HOST": "127.0.0.1",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "DYN_ZMQ_BROKER_URL": "xsub=tcp://127.0.0.1:9 , xpub=tcp://127.0.0.1:9",
    }
    assert texts(frontend.environment) == shared | {
        "DYN_ENABLE_RL": "true",
        "DYN_RL_PORT": "20002",
    }
    assert texts(first.environment) == shared | {
        "DYN_SYSTEM_PORT": "20003",
        "DYN_RL_INIT_WEIGHTS_TIMEOUT_S": "30",
    }
    assert deployment.fleet.target == "dynamo://127.0.0.1:8000?discovery=20002"
    # Dynamo reads the port of administration as a signed number of 16 bits.
    assert [need.ports["http"].below for need in config.needs] == [None, 32768, 32768]


def test_dynamo_workers_for_prefill_and_decode_are_told_apart() -> None:
    config = DynamoLaunch(model=MODEL, prefill_workers=1, decode_workers=2, router_mode="kv")
    deployment = planned(config)
    names = [component.name for component in deployment.components]
    assert names == ["frontend", "prefill0", "decode0", "decode1"]
    modes = [[a for a in c.argv if "disaggregation" in a] for c in deployment.components[1:]]
    assert modes == [
        ["--disaggregation-mode=prefill"],
        ["--disaggregation-mode=decode"],
        ["--disaggregation-mode=decode"],
    ]
    sides = [c.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for c in deployment.components[1:]]
    assert len(set(sides)) == 3
    transfer = '--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    assert all(transfer in component.argv for component in deployment.components[1:])
    assert "DYN_ZMQ_BROKER_URL" not in deployment.components[1].environment
    assert deployment.fleet.expect is not None
    assert deployment.fleet.expect.roles == {Role.PREFILL: 1, Role.DECODE: 2}


@pytest.mark.parametrize("kind", KINDS)
def test_an_ipv6_address_is_written_in_brackets(kind: str) -> None:
    deployment = planned(KINDS[kind](model=MODEL, host="::1"))
    assert "://[::1]:" in deployment.fleet.target
    assert all(component.url.startswith("http://[::1]:") for component in deployment.components)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"flags": ("--api-key=x",)}, "would show a secret"),
        ({"flags": ("--api_key", "x")}, "would show a secret"),
        ({"flags": ("--api-k=x",)}, "would show a secret"),
        ({"flags": ("--hf-token=x",)}, "would show a secret"),
        ({"flags": ("--some-password=x",)}, "would show a secret"),
        ({"flags": ("--aws-secret-access=x",)}, "would show a secret"),
        ({"flags": ("--secret-name", "x")}, "would show a secret"),
        ({"flags": ("--auth=x",)}, "would show a secret"),
        ({"flags": ("--auth", "x")}, "would show a secret"),
        ({"flags": ("--pw=x",)}, "would show a secret"),
        ({"flags": ("--pw", "-x")}, "would show a secret"),
        ({"flags": ("--github-pat=x",)}, "would show a secret"),
        ({"flags": ("--some.password=x",)}, "would show a secret"),
        ({"flags": ("--sslKeyfilePassword=x",)}, "would show a secret"),
        ({"flags": ("--hf-tok=x",)}, "would show a secret"),
        ({"flags": ("--token=123",)}, "would show a secret"),
        ({"flags": ("--service-keys=abc",)}, "would show a secret"),
        ({"flags": ("--header=x-some: y",)}, "would show a secret"),
        ({"flags": ("--some-option=Authorization: Bearer x",)}, "flag '--some-option' holds"),
        ({"flags": ("--some-option", "Authorization: Basic x")}, "follows a flag holds"),
        ({"flags": ('--json={"password":"x"}',)}, "flag '--json' holds"),
        ({"flags": ('--json={"a":[{"apiKey":"x"}]}',)}, "flag '--json' holds"),
        ({"flags": ('--json={"headers":["Bearer x"]}',)}, "flag '--json' holds"),
        ({"flags": ("--set", "db.password=x")}, "follows a flag holds"),
        ({"flags": ("--env=HF_TOKEN=x",)}, "flag '--env' holds"),
        ({"flags": ("--redis-url=redis://:pw@h",)}, "URL with user info"),
        ({"flags": ("--some-url", "http://u:pw@h")}, "URL with user info"),
        ({"flags": ('--some-config={"url": "http://u:pw@h"}',)}, "URL with user info"),
        ({"model": "s3://u:pw@h/model"}, "URL with user info"),
        ({"flags": ("--served-model-name=x",)}, "use model_name="),
        ({"flags": ("--served_model_name=x",)}, "use model_name="),
        ({"flags": ("--served-model=x",)}, "use model_name="),
        ({"flags": ("--tensor-parallel-size=2",)}, "use tensor_parallel_size="),
        ({"host": "0.0.0.0"}, "no address to be reached by"),  # noqa: S104 - refused
        ({"workers": 2, "ports": (1,)}, "give one for each"),
        ({"workers": 2, "ports": (1, 1)}, r"ports \[1\] are given twice"),
        ({"devices": ("0", "1")}, "give one for each"),
        ({"workers": 0}, "greater than or equal to 1"),
        ({"no_such_field": 1}, "not permitted"),
        ({"model": ""}, "at least 1 character"),
        ({"model": "--flag"}, "begins like a flag"),
    ],
)
def test_what_cannot_work_is_refused(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        KINDS[kind](**{"model": MODEL} | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefill_workers": 1}, "give both, or neither"),
        ({"workers": 1, "prefill_workers": 1, "decode_workers": 1}, "goes without"),
        ({"ports": (40000,)}, "not below 32768"),
        ({"frontend_port": 8000, "discovery_port": 8000}, r"ports \[8000\] are given twice"),
        ({"frontend_port": 8000, "ports": (8000,)}, r"ports \[8000\] are given twice"),
        ({"frontend_flags": ("--http-port=1",)}, "use frontend_port="),
        ({"flags": ("--endpoint=dyn://a.b.c",)}, "use namespace="),
        ({"frontend_flags": ("--etcd", "http://u:pw@h")}, "URL with user info"),
        ({"kv_transfer": {"extra": {"url": "redis://:pw@h"}}}, "URL with user info"),
        ({"kv_transfer": {"extra": {"access_token": "x"}}}, "kv_transfer= holds"),
        ({"frontend_flags": ("--control-plane-password=x",)}, "would show a secret"),
    ],
)
def test_what_dynamo_cannot_do_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DynamoLaunch(model=MODEL, **fields)


@pytest.mark.parametrize("field", ["port", "metrics_port"])
def test_a_port_that_is_given_to_a_gateway_is_no_worker_s(field: str) -> None:
    gateway = sglang.Gateway.model_validate({field: 8000})
    sglang.Launch(model=MODEL, ports=(8001,), gateway=gateway)
    with pytest.raises(ValidationError, match=r"ports \[8000\] are given twice"):
        sglang.Launch(model=MODEL, ports=(8000,), gateway=gateway)


def test_a_gateway_s_key_is_refused_among_its_flags() -> None:
    with pytest.raises(ValidationError, match="would show a secret"):
        sglang.Gateway(flags=("--api-key=x",))
    with pytest.raises(ValidationError, match="URL with user info"):
        sglang.Gateway(flags=("--redis-url", "redis://:pw@h"))


SOUNDING = {
    "vllm": """
        --allow-credentials --allowed-headers=["x-a","x-b"] --api-server-count=2
        --dbo-decode-token-threshold=32 --dbo-prefill-token-threshold=512
        --disable-access-log-for-endpoints=/health --disable-uvicorn-access-log
        --enable-auto-tool-choice --enable-prompt-tokens-details --enable-request-id-headers
        --h11-max-header-count=256 --hf-config-path=x --hf-overrides={"eos_token":"</s>"}
        --hf-token --long-prefill-token-threshold=4 --max-num-batched-tokens=8k
        --max-num-queued-tokens=1 --max-num-scheduled-tokens=1 --override-generation-config={}
        --return-tokens-as-token-ids --spec-tokens=4
        --speculative-config={"num_speculative_tokens":3}
        --ssl-keyfile=/k --tokenizer=x --tokenizer-mode=auto --tokens-only --tool-call-parser=hermes
        --kv-events-config={"topic":"x","endpoint":"tcp://*:5557"}
    """,
    "sglang": """
        --bucket-inter-token-latency=0.1 --bucket-time-to-first-token=0.1
        --disaggregation-bootstrap-port=8998 --enable-forward-pass-metrics
        --forward-pass-metrics-ipc-name=x --forward-pass-metrics-worker-id=x
        --generation-tokens-buckets=default --prompt-tokens-buckets=custom
        --kt-max-deferred-experts-per-token=2 --max-prefill-tokens=16384 --max-total-tokens=100
        --num-reserved-decode-tokens=512 --prefill-delayer-token-usage-low-watermark=0.5
        --sampling-mask-max-tokens=4 --skip-tokenizer-init
        --speculative-ngram-external-corpus-max-tokens=10 --speculative-num-draft-tokens=4
        --speculative-token-map=/map --ssl-keyfile=/k --swa-full-tokens-ratio=0.8
        --tbo-token-distribution-threshold=0.48 --tokenizer-metrics-custom-labels-header=x-labels
        --tokenizer-path=x --tool-call-parser=qwen25 --uvicorn-access-log-exclude-prefixes=/metrics
    """,
    "gateway": """
        --balance-token-usage-threshold=1.0 --client-key-path=/k --dp-minimum-tokens-scheduler
        --enable-token-usage-details --header-read-timeout-secs=30 --jwt-audience=x --jwt-issuer=x
        --jwt-jwks-uri=https://h/keys --jwt-role-mapping=Gateway.Admin=admin
        --least-load-mean-prefill-tokens=1024 --mesh-tls-key=/k --oracle-external-auth
        --overload-token-usage-threshold=1.0 --prefix-token-count=256
        --rate-limit-tokens-per-second=10 --request-id-headers=x-request-id
        --routing-key-headers=x-key --routing-key-override --sticky-key-idle-secs=60
        --storage-context-headers=x-tenant=tenant --tenant-header-name=x-tenant --tls-key-path=/k
        --tokenizer-path=x --trust-tenant-header --worker-overload-token-usage=0.8
    """,
    "dynamo": """
        --active-prefill-tokens-threshold=10 --active-prefill-tokens-threshold-frac=0.5
        --enable-anthropic-api --nats-tls-client-key-path=/k --router-track-prefill-tokens
        --router-tracking-key-file=/k --router-tracking-key-id=one --tcp-tls-client-key-path=/k
        --tcp-tls-key-path=/k --tls-key-path=/k --tokenizer=default
        --prefill-max-new-token-samples=10 --decode-max-kv-read-token-samples=10
    """,
}
"""Flags of vLLM 0.33, SGLang 0.5.23, smg 1.13 and Dynamo 1.6.1 with a word of secrets in them."""


@pytest.mark.parametrize("kind", SOUNDING)
@pytest.mark.parametrize("apart", [False, True])
def test_flags_of_the_engines_that_only_sound_like_secrets_pass(kind: str, *, apart: bool) -> None:
    flags = tuple(SOUNDING[kind].split())
    if apart:
        flags = tuple(part for flag in flags for part in flag.split("=", 1))
    if kind == "gateway":
        gateway = sglang.Gateway(flags=flags)
        argv = planned(sglang.Launch(model=MODEL, gateway=gateway)).components[-1].argv
        argv = argv[: argv.index("--worker-urls")]
    elif kind == "dynamo":
        argv = planned(DynamoLaunch(model=MODEL, frontend_flags=flags)).components[0].argv
    else:
        argv = planned(KINDS[kind](model=MODEL, flags=flags)).components[0].argv
    assert argv[-len(flags) :] == flags


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "hf-secret"),
        ("MY_API_KEY", "my-secret"),
        ("DB_PASSWORD", "db-secret"),
        ("REDIS_URL", "redis://user:secret@host"),
        ("OTEL_HEADERS", "Authorization=Bearer secret"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-some=secret"),
        ("GH_PAT", "secret"),
        ("AWS_SECRET_ACCESS", "secret"),
        ("SECRET_NAME", "secret"),
        ("BASIC_AUTH", "secret"),
        ("SOME_OPTIONS", '{"a": {"client_secret": "secret"}}'),
        ("SOME_LINES", '{\n "a": 1,\n "token": "secret"\n}\n'),
        ("PRIVATE_KEY", "-----BEGIN-----\r\nsecret\r\n-----END-----\r\n"),
    ],
)
def test_a_variable_that_looks_like_a_credential_is_not_shown(name: str, value: str) -> None:
    deployment = planned(vllm.Launch(model=MODEL, environment={name: value}))
    held = deployment.components[0].environment[name]
    assert isinstance(held, Key)
    assert held.reveal() == value
    assert "secret" not in str(deployment)
    assert "secret" not in repr(deployment)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("SOME_MAX_TOKENS", "12"),
        ("SOME_KEYS", ""),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/run/token"),
        ("PATH", "/bin"),
        ("SOME_OPTIONS", '{"eos_token": "</s>"}'),
    ],
)
def test_a_variable_that_only_sounds_like_a_credential_is_shown(name: str, value: str) -> None:
    deployment = planned(vllm.Launch(model=MODEL, environment={name: value}))
    assert deployment.components[0].environment[name] == value


def test_paths_are_made_absolute_and_names_stay() -> None:
    config = vllm.Launch(model="models/tiny", python=".venv/bin/python")
    there = config.located(lambda path: f"/home/{path}")
    assert (there.model, there.python) == ("/home/models/tiny", "/home/.venv/bin/python")
    assert vllm.Launch(model=MODEL, python="python3").located(lambda _: "/x").python == "python3"
