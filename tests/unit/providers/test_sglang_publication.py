"""A publication to SGLang servers, call by call, through the publisher."""

import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

import genapi
from genapi import PublishError, TransportError, WeightPublisher
from genapi.transports.base import StreamReply
from genapi.types.config import PublishTimeouts
from genapi.types.ids import WorkerId
from genapi.types.worker import Outcome, PublishReport, Receipt, Recovery
from genapi.weights import Memory, from_tensors
from genapi.wire.http import HTTPCall, HTTPReply
from tests.support.sglang_wire import recorded

TARGET = "sglang://127.0.0.1:30000"
WEIGHTS = {"a": np.ones(3, dtype=np.float32), "b": np.ones(2, dtype=np.float32)}
OK: dict[str, Any] = {"success": True, "message": "Success"}


class Server:
    """One SGLang server as far as a publication looks at it.

    Attributes:
        answers: what a route answers instead.
        calls: routes of administration that were asked, in order.
        bodies: what they were asked with.
        refused_label: the label that it refuses.
        lost_label: the label that it sets without an answer.
        gone: why it does not answer the next call: it `refuses` the connection, or `starts`.
    """

    in_process = True

    def __init__(self, **info: Any) -> None:
        self.answers: dict[str, HTTPReply] = {}
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.label = "default"
        self.refused_label = self.lost_label = ""
        self.paused = False
        self.gone = ""
        self._info = {**recorded("server_info_trimmed").json_object(), "dp_size": 1, **info}

    async def send(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> HTTPReply:
        url = base_url + call.path
        body = json.loads(call.body) if call.body else {}
        gone, self.gone = self.gone, ""
        if gone == "starts":
            return HTTPReply(503, b"", {}, url)
        if gone:
            message = "connection refused"
            raise TransportError(message, phase="not_sent") from ConnectionRefusedError()
        if call.method == "POST":
            self.calls.append(call.path)
            self.bodies.append(body)
        if call.path in self.answers:
            return self.answers[call.path]
        if call.path in ("/ready", "/ping"):
            serves = call.path == "/ping" or not self.paused
            return HTTPReply(200 if serves else 503, b"", {}, url)
        return HTTPReply(200, json.dumps(self._answer(call.path, body)).encode(), {}, url)

    def _answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/model_info":
            return {**recorded("model_info").json_object(), "weight_version": self.label}
        if path == "/server_info":
            return self._info
        if path == "/v1/models":
            return recorded("v1_models").json_object()
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
        if path == "/update_weight_version":
            return self._relabel(body["new_version"])
        return OK

    def _relabel(self, label: str) -> dict[str, Any]:
        if label == self.refused_label:
            return {"success": False, "message": "no"}
        self.label = label
        if label == self.lost_label:
            raise TransportError("the connection was reset", phase="may_have_run")
        return OK

    def stream(
        self, base_url: str, call: HTTPCall, *, headers: Mapping[str, str] = {}
    ) -> AbstractAsyncContextManager[StreamReply]:
        raise NotImplementedError

    async def aclose(self) -> None:
        pass


async def publish(server: Server, **how: Any) -> PublishReport:
    async with (
        genapi.connect(TARGET, transport=server, run="r") as fleet,
        WeightPublisher(fleet, transport=Memory(bucket_tensors=1), **how) as publisher,
    ):
        return await publisher.publish(1, from_tensors(WEIGHTS))


async def receipt_of(server: Server, **how: Any) -> Receipt:
    with pytest.raises(PublishError) as caught:
        await publish(server, **how)
    (receipt,) = caught.value.report.receipts
    assert isinstance(receipt, Receipt)
    return receipt


def failed(message: str, status: int = 400) -> HTTPReply:
    return HTTPReply(status, json.dumps({"success": False, "message": message}).encode())


async def test_a_publication_is_sglangs_own_calls_in_order() -> None:
    server = Server()
    report = await publish(server)
    assert report.committed
    assert server.calls == [
        "/destroy_weights_update_group",
        "/init_weights_update_group",
        "/pause_generation",
        "/flush_cache",
        "/update_weight_version",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/update_weights_from_distributed",
        "/end_weight_update",
        "/update_weight_version",
        "/continue_generation",
        "/destroy_weights_update_group",
    ]
    labels = [b["new_version"] for b in server.bodies if "new_version" in b]
    assert labels == ["genapi:r:1:1!updating", "genapi:r:1:1"]
    assert (server.label, server.paused) == ("genapi:r:1:1", False)


async def test_a_publication_that_keeps_old_keys_and_values_flushes_nothing() -> None:
    server = Server()
    assert (await publish(server, in_flight_kv="stale")).committed
    assert "/flush_cache" not in server.calls
    assert {"mode": "in_place"} in server.bodies


@pytest.mark.parametrize(
    ("info", "how", "reason"),
    [
        ({"dp_size": 2}, {}, "--dp-size is 2"),
        ({"pp_size": 2}, {}, "--pp-size is 2"),
        ({}, {"mode": "drain"}, "mode='keep'"),
    ],
)
async def test_what_cannot_be_published_to_is_refused_before_anything_is_touched(
    info: dict[str, Any], how: dict[str, Any], reason: str
) -> None:
    server = Server(**info)
    receipt = await receipt_of(server, **how)
    assert reason in str(receipt.error)
    assert (receipt.outcome, server.calls) == (Outcome.UNTOUCHED, [])


async def test_a_cache_that_cannot_be_flushed_ends_a_publication_that_goes_on_serving() -> None:
    server = Server()
    server.answers["/flush_cache"] = recorded("flush_cache_busy")
    receipt = await receipt_of(server)
    assert (receipt.outcome, receipt.recovery) == (Outcome.UNTOUCHED, Recovery.REPUBLISH)
    assert "/begin_weight_update" not in server.calls
    assert (server.label, server.paused) == ("default", False)


@pytest.mark.case("WUP-03")
@pytest.mark.parametrize(
    ("path", "answer", "outcome", "recovery"),
    [
        (
            "/update_weights_from_distributed",
            recorded("weights_16_wrong_shape"),
            Outcome.DIRTY,
            Recovery.CLOSE_THEN_REPUBLISH,
        ),
        (
            "/update_weights_from_distributed",
            recorded("weights_19_trainer_dies_before_broadcast"),
            Outcome.DIRTY,
            Recovery.CLOSE_THEN_REPUBLISH,
        ),
        (
            "/begin_weight_update",
            recorded("weights_04b_begin_twice"),
            Outcome.UNKNOWN,
            Recovery.CLOSE_THEN_REPUBLISH,
        ),
        (
            "/end_weight_update",
            failed("post load failed"),
            Outcome.DIRTY,
            Recovery.RESTART_THEN_PUBLISH,
        ),
    ],
)
async def test_a_failure_in_the_middle_leaves_a_paused_worker_with_its_way_back(
    path: str, answer: HTTPReply, outcome: Outcome, recovery: Recovery
) -> None:
    server = Server()
    server.answers[path] = answer
    receipt = await receipt_of(server)
    assert (receipt.outcome, receipt.recovery) == (outcome, recovery)
    assert server.paused
    assert server.label == "genapi:r:1:1!updating"
    assert "/continue_generation" not in server.calls


async def test_a_session_that_cannot_be_closed_after_a_failure_needs_a_restart() -> None:
    server = Server()
    server.answers["/update_weights_from_distributed"] = recorded(
        "weights_19_trainer_dies_before_broadcast"
    )
    server.answers["/end_weight_update"] = failed("post load failed")
    receipt = await receipt_of(server)
    assert (receipt.outcome, receipt.recovery) == (Outcome.DIRTY, Recovery.RESTART_THEN_PUBLISH)


async def test_after_a_failure_the_next_publication_closes_the_session_first() -> None:
    server = Server()
    server.answers["/update_weights_from_distributed"] = recorded("weights_16_wrong_shape")
    await receipt_of(server)
    server.answers.clear()
    server.calls.clear()
    report = await publish(server)
    assert report.committed
    begin = server.calls.index("/begin_weight_update")
    assert server.calls[begin - 1] == "/end_weight_update"
    assert (server.label, server.paused) == (report.version.label, False)


@pytest.mark.parametrize(
    ("label", "outcome", "recovery"),
    [
        ("genapi:r:1:1!updating", Outcome.UNTOUCHED, None),
        ("genapi:r:1:1", Outcome.UNKNOWN, Recovery.REPUBLISH),
    ],
    ids=["written ahead", "final"],
)
async def test_a_refused_label_leaves_a_worker_serving_only_where_nothing_had_begun(
    label: str, outcome: Outcome, recovery: Recovery | None
) -> None:
    server = Server()
    server.refused_label = label
    receipt = await receipt_of(server)
    assert (receipt.outcome, receipt.recovery) == (outcome, recovery)
    assert server.paused == (outcome is not Outcome.UNTOUCHED)


async def test_a_label_whose_answer_was_lost_is_read_back() -> None:
    server = Server()
    server.lost_label = "genapi:r:1:1"
    assert (await publish(server)).committed


@pytest.mark.case("WUP-05")
async def test_an_end_whose_answer_was_lost_proves_nothing() -> None:
    server = Server()
    server.answers["/end_weight_update"] = HTTPReply(504, b"<html>")
    receipt = await receipt_of(server)
    assert (receipt.outcome, receipt.recovery) == (
        Outcome.UNKNOWN,
        Recovery.CLOSE_THEN_REPUBLISH,
    )


@pytest.mark.parametrize("how", ["refuses", "starts"])
async def test_a_restart_of_a_server_that_names_no_start_is_known_by_its_absence(how: str) -> None:
    restarted: list[str] = []
    server = Server(startup_time=None)
    server.answers["/end_weight_update"] = failed("post load failed")

    async def restart(worker: WorkerId, url: str) -> None:
        restarted.append(url)
        server.answers.clear()
        server.label, server.paused, server.gone = "default", False, how

    report = await publish(server, restarter=restart, timeouts=PublishTimeouts(restart_s=10))
    assert report.committed
    assert report.version.attempt == 2
    assert restarted == [TARGET.replace("sglang", "http")]
