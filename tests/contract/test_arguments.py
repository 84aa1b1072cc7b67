"""Arguments of public calls: what is no mistake is taken, a mistake is named with its remedy."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import genapi
from genapi import ConfigError, FleetConfig, GenerateRequest, PolicyVersion, SamplingParams
from genapi.board import FileBoard
from genapi.providers import vllm
from genapi.weights import Filesystem, Gloo, Memory, from_tensors
from tests.contract.embedded import QUICK, rig, weights

pytestmark = pytest.mark.anyio


class OfAnOlder:
    """A transport of one's own that was written for an older genapi."""

    bucket_bytes = bucket_tensors = 1
    stage_bytes = 1

    def __init__(self, *methods: str) -> None:
        for method in methods:
            setattr(self, method, lambda *_: None)

    def check(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError


OLDER_STORE = OfAnOlder("write", "discard", "tidy")
OLDER_GROUP = OfAnOlder("backend", "acknowledges", "sender")


OF_A_PUBLISHER: list[tuple[dict[str, Any], str]] = [
    ({"fleet": None}, r"fleet=None: pass what genapi\.connect"),
    ({"fleet": "vllm://w1:8001"}, r"fleet='vllm://w1:8001': pass"),
    ({"transport": None}, r"transport=None is no weight transport: pass genapi\.weights\.Gloo"),
    ({"transport": Memory}, r"transport=<class .*Memory'> is no weight transport"),
    ({"transport": OfAnOlder()}, r"is no weight transport: pass genapi\.weights\.Gloo"),
    ({"transport": OLDER_STORE}, "it lacks close, opened, taken of genapi.*WeightStore"),
    ({"transport": OLDER_GROUP}, "it lacks digests, towards of genapi.*GroupTransport"),
    ({"on_partial": "zzz"}, "on_partial='zzz': choose one of hold, serve"),
    ({"on_partial": None}, "on_partial=None: choose one of hold, serve"),
    ({"on_partial": "serve", "min_workers": 1.5}, r"min_workers=1\.5: pass a whole number of"),
    ({"on_partial": "serve", "min_workers": True}, "min_workers=True: pass a whole number of"),
    ({"on_partial": "serve", "min_workers": "1"}, "min_workers='1': pass a whole number of"),
    ({"on_partial": "serve", "min_workers": 0}, "min_workers=0: .* at least 1, or None"),
    ({"max_workers_per_group": 2.0}, r"max_workers_per_group=2\.0: pass a whole number"),
    ({"max_workers_per_group": False}, "max_workers_per_group=False: pass a whole number"),
    ({"mode": "wait"}, "mode='wait': choose one of abort, drain, keep"),
    ({"mode": None}, "mode=None: choose one of"),
    ({"in_flight_kv": 0}, "in_flight_kv=0: choose one of"),
    ({"prefix_cache": ["salt"]}, r"prefix_cache=\['salt'\]: choose one of"),
    ({"verify": None}, "verify=None: pass some of label, checksum, probe"),
    ({"verify": 5}, "verify=5: pass some of"),
    ({"probe_ids": 5}, "probe_ids=5: token ids must be a sequence"),
    ({"probe_ids": ["a", "b"]}, r"probe_ids=\['a', 'b'\]: token id at position 0"),
    ({"probe_tolerance": "x"}, "probe_tolerance='x': pass nats"),
    ({"probe_tolerance": True}, "probe_tolerance=True: pass nats"),
    ({"probe_max_gap": math.nan}, "probe_max_gap=nan: pass nats"),
    ({"timeouts": {"pause_s": 3}}, r"timeouts=\{'pause_s': 3\}: pass a genapi\.PublishTimeouts"),
    ({"restarter": "pod"}, "restarter='pod': pass a function, or None"),
]


@pytest.mark.parametrize(("options", "said"), OF_A_PUBLISHER)
async def test_a_publisher_refuses_what_it_cannot_take_with_the_value_and_the_remedy(
    options: dict[str, Any], said: str
) -> None:
    async with rig(1) as r:
        with pytest.raises(ConfigError, match=said):
            genapi.WeightPublisher(**{"fleet": r.fleet, "transport": Memory(), **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step": 1.5}, r"step=1\.5: pass a whole number of at least 0, or a PolicyVersion"),
        ({"step": True}, "step=True: pass a whole number"),
        ({"step": "1"}, "step='1': pass a whole number"),
        ({"step": 10**18}, r"step=10+: pass a step below 10\*\*18"),
        ({"source": None}, "NoneType is no weight source"),
        ({"mode": 0}, "mode=0: choose one of"),
        ({"mode": ""}, "mode='': choose one of"),
        ({"in_flight_kv": False}, "in_flight_kv=False: choose one of"),
        ({"prefix_cache": ""}, "prefix_cache='': choose one of"),
        ({"manifest_changed": "no"}, "manifest_changed='no': pass True or False"),
    ],
)
async def test_a_publication_refuses_what_it_cannot_take_before_anything_is_touched(
    options: dict[str, Any], said: str
) -> None:
    async with rig(1) as r:
        publisher = genapi.WeightPublisher(r.fleet, transport=Memory(), timeouts=QUICK)
        await publisher.adopt(0)
        with pytest.raises(ConfigError, match=said):
            await publisher.publish(**{"step": 1, "source": from_tensors(weights(1)), **options})
        committed = (await r.fleet.snapshot()).committed
        assert committed is not None
        assert committed.step == 0


async def test_whole_numbers_of_numpy_are_whole_numbers_wherever_a_step_or_a_count_goes() -> None:
    async with rig(2) as r:
        publisher = genapi.WeightPublisher(
            r.fleet,
            transport=Memory(bucket_tensors=np.int64(2)),  # type: ignore[arg-type]
            timeouts=QUICK,
            on_partial="serve",
            min_workers=np.int64(2),  # type: ignore[arg-type]
            max_workers_per_group=np.int32(1),  # type: ignore[arg-type]
        )
        await publisher.adopt(np.int64(0))  # type: ignore[arg-type]
        report = await publisher.publish(np.int64(1), from_tensors(weights(1)))  # type: ignore[arg-type]
        assert report.committed
        version = report.version
        assert version == PolicyVersion(run=version.run, step=np.int64(1))  # type: ignore[arg-type]
        assert type(report.version.step) is int
        request = GenerateRequest(
            prompt_token_ids=[1, 2],
            sampling=SamplingParams(max_tokens=2),
            min_version=np.int64(1),  # type: ignore[arg-type]
        )
        trace = (await r.fleet.generate(request)).output.policy
        window = genapi.OffPolicyWindow(max_lag=np.int64(1))  # type: ignore[arg-type]
        verdict = window.judge(trace, consumer_version=np.int64(2))  # type: ignore[arg-type]
        assert (verdict.accepted, verdict.lag) == (True, 1)
        assert type(verdict.lag) is int
    config = FleetConfig(target="vllm://w:1", max_in_flight=np.int64(3))  # type: ignore[arg-type]
    assert FleetConfig.from_toml(config.to_toml()) == config


@pytest.mark.parametrize("version", [1.5, True, "3", None, -1, 10**18])
def test_a_sample_is_judged_for_a_step_or_a_version_and_for_nothing_else(version: Any) -> None:
    trace = genapi.PolicyTrace.unknown(3)
    for ask in (
        functools.partial(genapi.OffPolicyWindow(max_lag=1).judge, trace),
        trace.lag,
        genapi.PolicyTrace(source="frozen").lag,
    ):
        with pytest.raises(ConfigError, match=r"consumer_version=.*: pass a"):
            ask(version)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda f: f.wait_ready("5"), "timeout_s='5': pass seconds, more than 0"),
        (lambda f: f.wait_ready(None), "timeout_s=None: pass seconds"),
        (lambda f: f.wait_ready(True), "timeout_s=True: pass seconds"),
        (lambda f: f.generate(None), r"is a NoneType: pass a genapi\.GenerateRequest"),
        (lambda f: f.stream("hush").__aenter__(), r"is a str: pass a genapi\.GenerateRequest"),
        (lambda f: f.abort(5), "request_id=5: pass the label"),
    ],
)
async def test_a_fleet_refuses_what_it_cannot_take_and_shows_no_prompt(
    call: Callable[[genapi.Fleet], Any], said: str
) -> None:
    async with rig(1) as r:
        with pytest.raises(ConfigError, match=said) as caught:
            await call(r.fleet)
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": None}, r"target=None: pass text such as 'vllm://"),
        ({"target": b"vllm://w:1"}, "target=b'vllm://w:1': pass text"),
        ({"board": 5}, "board=5: pass a URL, an open board, or None"),
        ({"board": FileBoard}, "board=<class .*FileBoard'>: pass a URL"),
        ({"transport": "aiohttp"}, "transport='aiohttp': pass a transport, or None"),
        ({"observe": None}, "observe=None: pass a function"),
    ],
)
def test_connecting_refuses_what_cannot_be_taken(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        genapi.connect(**{"target": "vllm://w:1", **options})


@pytest.mark.parametrize(
    "options",
    [
        {"max_in_flight": True},
        {"max_in_flight": 1.0},
        {"max_in_flight": "3"},
        {"refresh_s": "5"},
        {"refresh_s": True},
        {"strict": "yes"},
        {"expect": {"workers": True}},
        {"retry": {"max_attempts": 2.0}},
        {"retry": {"retry_lost_replies": 1}},
    ],
)
def test_options_of_a_fleet_are_numbers_and_truth_values_and_not_what_looks_like_them(
    options: dict[str, Any],
) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        genapi.connect("vllm://w:1", **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"config": None}, r"config=None: pass genapi\.providers\.vllm\.Launch"),
        ({"config": vllm.Launch}, r"config=<class .*Launch'>: pass genapi"),
        ({"start_timeout_s": None}, "start_timeout_s=None: pass seconds"),
        ({"stop_timeout_s": "5"}, "stop_timeout_s='5': pass seconds"),
        ({"on_exit": "zzz"}, "on_exit='zzz': choose one of stop, leave"),
        ({"folder": 5}, "folder=5: pass the path"),
        ({"observe": None}, "observe=None: pass a function"),
    ],
)
def test_launching_refuses_what_cannot_be_taken(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        genapi.launch(**{"config": vllm.Launch(model="some/model"), **options})


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Gloo(timeout_s="5"), "timeout_s='5': pass seconds, more than 0, or None"),  # type: ignore[arg-type]
        (lambda: Memory(bucket_bytes=True), "bucket_bytes=True: pass a whole number"),
        (lambda: Filesystem(None), "dir=None: pass the path of a directory"),  # type: ignore[arg-type]
        (lambda: Filesystem(5), "dir=5: pass the path of a directory"),  # type: ignore[arg-type]
        (lambda: Filesystem("/w", base=5), "base=5: pass the path of a directory"),  # type: ignore[arg-type]
        (lambda: Filesystem("/w", keep=1.0), r"keep=1\.0: pass a whole number"),  # type: ignore[arg-type]
        (lambda: FileBoard("/b", timeout_s=0), "timeout_s=0: pass seconds"),
        (lambda: FileBoard("/b", timeout_s=None), "timeout_s=None: pass seconds"),  # type: ignore[arg-type]
    ],
)
def test_transports_and_boards_refuse_what_they_cannot_take(
    build: Callable[[], object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        build()
