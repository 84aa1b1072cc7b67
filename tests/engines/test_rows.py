"""Every row that claims to have been run on vLLM, reached through genapi on a real vLLM.

A publication of seed 1 is made to go wrong; the receipt has to say what the row says; then the way
back that the row names has to lead to exactly the weights of a next publication. The way back of
REPUBLISH is taken straight: the label that would have the worker healed first is written over.
"""

from __future__ import annotations

import contextlib
import http
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import anyio
import pytest
import torch
from safetensors.torch import load_file

import genapi
from genapi import Outcome, PolicyVersion
from genapi.events import AdminCalled, Event, PhaseStarted
from genapi.providers.base import Admin
from genapi.providers.registry import provider
from genapi.providers.vllm.verdicts import ROWS
from genapi.publication.evidence import Observed, Op, Reached, Seen
from genapi.publication.table import Phase
from genapi.testing.contract.meddling import Trouble, goes_to
from genapi.types.worker import Evidence, FenceStrength, PublishReport, Receipt, Recovery
from genapi.wire.http import HTTPCall
from tests.engines import test_verification
from tests.engines.kit.judge import Judge
from tests.engines.kit.meddling import Breaking, at_second_update, meddling
from tests.engines.kit.rows import assert_reached
from tests.engines.test_vllm import LIMITS, PROMPT, request, target, weights

if TYPE_CHECKING:
    from tests.engines.conftest import Models, Oracle, Serve
    from tests.engines.kit.server import Server

on_engine = (pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio)

BUCKET_TENSORS = 9  # of 27: three buckets
START, UPDATE = "/start_weight_update", "/update_weights"
FINISH, LABEL, RESUME = "/finish_weight_update", "/update_weight_version", "/resume"
LAYER = "model.layers.1."
FUSED = f"{LAYER}self_attn.q_proj.weight"


def engine(test: Any) -> Any:
    """Mark a test that needs a real engine; the others of this file run everywhere."""
    for mark in on_engine:
        test = mark(test)
    return test


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Server]:
    """One server, for ways that lead back."""
    with serve(1) as (one,):
        yield one


def post(server: Server, path: str, body: object = None) -> None:
    status, reply = server.request("POST", path, body)
    assert status == http.HTTPStatus.OK, reply


@dataclass(frozen=True)
class Way:
    """How a publication comes to one row.

    Attributes:
        row: what the worker shows.
        troubles: what goes wrong with calls.
        at: when something is done from outside: at the start of a phase, or before the nth call to
            a path is sent.
        hook: what somebody does to the server then; None = the publication is cancelled.
        breaks: whether the sender breaks at its second bucket, before or after that is taken.
        options: of the publisher.
        scores: the trainer's numbers; None = not given.
        error: how the receipt's error begins; None = by what the row names.
    """

    row: Seen
    troubles: tuple[Trouble, ...] = ()
    at: Phase | tuple[str, int] | None = None
    hook: Callable[[Server], None] | None = None
    breaks: Literal["never", "early", "late"] = "never"
    options: dict[str, Any] = field(default_factory=dict)
    scores: float | None = None
    error: str | None = None


def without_shapes(body: dict[str, Any]) -> dict[str, Any]:
    info = {name: value for name, value in body["update_info"].items() if name != "shapes"}
    return {"update_info": info}


def relabel(server: Server) -> None:
    post(server, LABEL, {"new_version": "somebody"})


def generate(server: Server) -> None:
    """Resume it in the middle of its session, and have it make a token."""
    post(server, RESUME)
    sampling = {"max_tokens": 4, "temperature": 0}
    server.request(
        "POST", "/inference/v1/generate", {"token_ids": [5], "sampling_params": sampling}
    )
    server.process.wait(60)


WAYS: dict[str, Way] = {
    "somebody else began": Way(
        Seen(Op.BEGIN, Observed.SESSION_OPEN, Reached.EMPTY),
        at=Phase.BEGIN,
        hook=lambda server: post(server, START),
    ),
    "the reply to begin was lost": Way(
        Seen(Op.BEGIN, Observed.LOST, Reached.EMPTY), (Trouble(START, "lose_reply"),)
    ),
    "the call to begin never arrived": Way(
        Seen(Op.BEGIN, Observed.LOST, Reached.EMPTY), (Trouble(START, "swallow"),)
    ),
    "an update that says too little": Way(
        Seen(Op.UPDATE, Observed.REFUSED, Reached.SENT),
        (Trouble(UPDATE, "change", nth=2, change=without_shapes),),
    ),
    "the trainer broke in the second bucket": Way(
        Seen(Op.UPDATE, Observed.PEER_LOST, Reached.SENT), breaks="early"
    ),
    "the trainer broke and the reply was lost": Way(
        Seen(Op.UPDATE, Observed.LOST, Reached.SENT),
        (Trouble(UPDATE, "lose_reply", nth=2),),
        breaks="early",
    ),
    "somebody else closed the session before the update": Way(
        Seen(Op.UPDATE, Observed.NO_SESSION, Reached.SENT),
        at=(UPDATE, 2),
        hook=lambda server: post(server, FINISH),
    ),
    "a label that is no text": Way(
        Seen(Op.FINISH, Observed.REFUSED, Reached.SENT),
        (Trouble(FINISH, "change", change=lambda _: {"weight_version": 7}),),
    ),
    "somebody else closed the session before the label": Way(
        Seen(Op.FINISH, Observed.NO_SESSION, Reached.SENT),
        at=Phase.FINISH,
        hook=lambda server: post(server, FINISH),
    ),
    "the call to finish never arrived": Way(
        Seen(Op.READ, Observed.OTHER_LABEL, Reached.SENT),
        (Trouble(FINISH, "swallow"),),
    ),
    "somebody else labelled it before it was read": Way(
        Seen(Op.READ, Observed.OTHER_LABEL, Reached.SENT), at=Phase.VERIFY, hook=relabel
    ),
    "cancelled after begin": Way(
        Seen(Op.CLOSE, Observed.DONE, Reached.EMPTY), at=Phase.BEGIN, error=""
    ),
    "cancelled in the second bucket": Way(
        Seen(Op.UPDATE, Observed.PEER_LOST, Reached.SENT), at=(UPDATE, 2)
    ),
    "the trainer broke when the second bucket was taken": Way(
        Seen(Op.CLOSE, Observed.DONE, Reached.SENT), breaks="late", error=""
    ),
    "a finish that arrived twice": Way(
        Seen(Op.READ, None, Reached.HELD),
        (Trouble(FINISH, "twice"),),
        error="finish: no_session: ",
    ),
    "a resume that something in between refused": Way(
        Seen(Op.READ, None, Reached.HELD),
        (Trouble(RESUME, "error", status=503),),
        error="resume: ",
    ),
    "somebody else labelled it after the resume": Way(
        Seen(Op.PROBE, Observed.OTHER_LABEL, Reached.HELD), at=Phase.PROBE, hook=relabel
    ),
    "scores that are not the trainer's": Way(
        Seen(Op.PROBE, Observed.DIFFERS, Reached.HELD), options={"verify": ("probe",)}, scores=-1.0
    ),
}

RUINS: dict[str, Way] = {
    "a token was generated in the session": Way(
        Seen(None, Observed.DEAD, Reached.SENT), at=(UPDATE, 2), hook=generate, error="update: "
    ),
    "killed before it was asked to begin": Way(
        Seen(None, Observed.DEAD, Reached.NOT_BEGUN),
        at=Phase.CONFIRM,
        hook=lambda server: os.killpg(server.pid, signal.SIGKILL),
        error="confirm: ",
    ),
}

ANY = Way(Seen(None, None, Reached.HELD))


class Publication:
    """A publication of step 1 that takes such a way, and the calls of the fleet."""

    def __init__(self, way: Way, server: Server, admin: Admin) -> None:
        self.way = way
        self.admin = admin
        self.server = server
        self.scope = anyio.CancelScope()
        self.operations: list[str] = []
        self.second_bucket = anyio.Event()
        """Set when a worker is asked to take a second bucket."""
        self._told = at_second_update(self.second_bucket.set)
        self.transport = meddling(*way.troubles, told=self._called)

    def observe(self, event: Event) -> None:
        at = self.way.at
        if isinstance(event, AdminCalled):
            self.operations.append(event.operation)
        if isinstance(event, PhaseStarted) and event.version.step == 1 and at == event.phase:
            self._act()

    def _called(self, call: HTTPCall) -> None:
        self._told(call)
        match self.way.at:
            case (str() as route, nth) if goes_to(route, call):
                if self.transport.sent(route) == nth:
                    self._act()

    def _act(self) -> None:
        if self.way.hook is None:
            self.scope.cancel()
        else:
            self.way.hook(self.server)

    async def run(self, p: genapi.WeightPublisher, source: genapi.weights.WeightSource) -> Receipt:
        scores = None if self.way.scores is None else [self.way.scores] * len(p.probe_ids)
        with anyio.fail_after(120), self.scope, contextlib.suppress(genapi.PublishError):
            await p.publish(1, source, probe_logprobs=scores)
        report = p.last_report
        assert isinstance(report, PublishReport)
        print(f"\n{report}")
        assert not report.committed
        (receipt,) = report.receipts
        verdict = self.admin.verdicts[self.way.row]
        assert (receipt.outcome, receipt.evidence) == (verdict.outcome, verdict.evidence)
        assert receipt.recovery is verdict.recovery
        assert receipt.fence is not None
        named = f"{self.way.row.op}: {self.way.row.observed}: "
        begins = named if self.way.error is None else self.way.error
        assert (receipt.error or "").startswith(begins)
        assert (receipt.error is None) == (begins == "")
        return receipt


@contextlib.asynccontextmanager
async def publishing(
    way: Way,
    server: Server,
    run: str,
    *,
    place: str | None = None,
    files: genapi.weights.Filesystem | None = None,
) -> AsyncIterator[tuple[Publication, genapi.WeightPublisher, genapi.Fleet]]:
    """A publication to come, over gloo or through files, and its publisher.

    `place` is a target other than the server.
    """
    admin = provider(server.engine.scheme).administer(None, files=files is not None)
    publication = Publication(way, server, admin)
    gloo = genapi.weights.Gloo(timeout_s=20, bucket_tensors=BUCKET_TENSORS)
    transport: Any = gloo if files is None else files
    if way.breaks != "never":
        transport = Breaking(transport, publication.second_bucket, late=way.breaks == "late")
    async with (
        contextlib.aclosing(publication.transport),
        genapi.connect(
            place or target(server),
            run="".join(c if c.isalnum() else "-" for c in run),
            transport=publication.transport,
            observe=publication.observe,
        ) as fleet,
    ):
        await fleet.wait_ready(timeout_s=60)
        async with genapi.WeightPublisher(
            fleet, transport=transport, timeouts=LIMITS, **way.options
        ) as p:
            yield publication, p, fleet


async def leads_back(
    p: genapi.WeightPublisher,
    fleet: genapi.Fleet,
    models: Models,
    oracle: Oracle,
    *,
    source: str = "engine",
) -> None:
    """Two more publications, and the server serves exactly what each brought."""
    judge = Judge(oracle, {2: models.seed1, 3: models.seed0})
    for step, folder in ((2, models.seed1), (3, models.seed0)):
        report = await p.publish(step, weights(folder))
        assert report.committed
        judge.check(await fleet.generate(request()), PROMPT, source=source)
    judge.close()


@engine
@pytest.mark.parametrize("name", WAYS)
async def test_a_row_says_what_is_true_of_vllm_and_its_way_back_leads_back(
    name: str, server: Server, models: Models, oracle: Oracle
) -> None:
    async with publishing(WAYS[name], server, name) as (publication, p, fleet):
        receipt = await publication.run(p, weights(models.seed1))
        publication.operations.clear()
        if receipt.recovery is Recovery.REPUBLISH:
            relabel(server)
        if receipt.recovery is not Recovery.RESTART_THEN_PUBLISH:
            await leads_back(p, fleet, models, oracle)
            heals = receipt.recovery is Recovery.CLOSE_THEN_REPUBLISH
            assert (Op.HEAL in publication.operations) == heals
            return
        with pytest.raises(genapi.PublishError, match="restart it first"):
            await p.publish(2, weights(models.seed1))
    # Nobody knows whether it has to be restarted: a process that does not know tries to heal it.
    async with publishing(ANY, server, "back") as (again, p, fleet):
        await leads_back(p, fleet, models, oracle)
        assert Op.HEAL in again.operations


@engine
@pytest.mark.parametrize("name", RUINS)
async def test_a_server_that_is_gone_is_dead_and_has_to_be_restarted(
    name: str, serve: Serve, models: Models
) -> None:
    with serve(1) as (own,):
        async with publishing(RUINS[name], own, name) as (publication, p, _):
            receipt = await publication.run(p, weights(models.seed1))
            assert receipt.fence is not None
            assert receipt.fence.strength is FenceStrength.DEAD


BAD = torch.zeros(3, 3)
REJECTED = Way(Seen(Op.UPDATE, Observed.REJECTED, Reached.SENT))
NOT_HEALED = Way(Seen(Op.HEAL, Observed.REJECTED, Reached.NOT_BEGUN))
NOT_FINISHED = Way(Seen(Op.FINISH, Observed.REJECTED, Reached.SENT))
NOT_CLOSED = Way(Seen(Op.CLOSE, Observed.REJECTED, Reached.SENT), breaks="late")


@engine
@pytest.mark.parametrize("way", [NOT_FINISHED, NOT_CLOSED], ids=["finish", "close"])
async def test_a_rejected_tensor_is_replayed_whenever_a_session_is_closed(
    way: Way, serve: Serve, models: Models
) -> None:
    tensors = load_file(models.seed1 / "model.safetensors")
    bad = genapi.weights.from_tensors(tensors | {FUSED: BAD})
    # What is not of the layer with the bad tensor can be sent, label and all.
    others = genapi.weights.from_tensors({n: t for n, t in tensors.items() if LAYER not in n})
    with serve(1) as (own,):
        async with publishing(REJECTED, own, "rejected") as (publication, p, _):
            await publication.run(p, bad)
        relabel(own)
        async with publishing(way, own, "relabelled") as (publication, p, _):
            await publication.run(p, others)
            assert Op.HEAL not in publication.operations
        async with publishing(NOT_HEALED, own, "healing") as (publication, p, _):
            await publication.run(p, others)
        # Closing failed, so the session is open still.
        status, reply = own.request("POST", START)
        assert status == http.HTTPStatus.INTERNAL_SERVER_ERROR
        assert "already active" in str(reply)


@engine
async def test_both_replies_lost_are_decided_by_the_label_that_is_read_back(
    server: Server, models: Models, oracle: Oracle
) -> None:
    lost = Way(
        ANY.row,
        (
            Trouble(UPDATE, "lose_reply", nth=3),
            Trouble(FINISH, "lose_reply"),
        ),
    )
    async with publishing(lost, server, "both") as (_, p, fleet):
        report = await p.publish(1, weights(models.seed1))
        assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED]
        assert [r.evidence for r in report.receipts] == [Evidence.OWN_LABEL]
        judge = Judge(oracle, {1: models.seed1})
        judge.check(await fleet.generate(request()), PROMPT)
        judge.close()
        await p.publish(2, weights(models.seed0))


@engine
async def test_an_empty_session_moves_the_label_and_no_weights(
    server: Server, models: Models, oracle: Oracle
) -> None:
    async with publishing(ANY, server, "empty") as (_, p, fleet):
        await p.publish(1, weights(models.seed0))
        version = PolicyVersion(run="empty", step=2)
        post(server, "/pause?mode=keep")
        post(server, START)
        post(server, FINISH, {"weight_version": version.label})
        post(server, RESUME)
        assert [w.version for w in (await fleet.snapshot()).workers] == [version]
        reply = await fleet.generate(request())
        assert reply.output.policy.oldest == version
        assert Judge(oracle, {2: models.seed0}).mismatches(reply, PROMPT) == 0
        assert Judge(oracle, {2: models.seed1}).mismatches(reply, PROMPT) > 0


@engine
async def test_a_label_moved_while_a_request_runs_is_a_boundary_though_no_weight_moved(
    server: Server, models: Models, oracle: Oracle
) -> None:
    async with publishing(ANY, server, "moved") as (_, p, fleet):
        await p.publish(1, weights(models.seed0))
        label = PolicyVersion(run="moved", step=2).label
        async with fleet.stream(request(tokens=2000)) as events:
            await anext(events)
            post(server, LABEL, {"new_version": label})
            last = [event async for event in events][-1]
        assert isinstance(last, genapi.Finished)
        assert [s.lo.step for s in last.reply.output.policy.spans if s.lo] == [1, 2]
        judge = Judge(oracle, {1: models.seed0, 2: models.seed0})
        assert judge.mismatches(last.reply, PROMPT) == 0


@engine
async def test_a_paused_server_with_an_old_label_is_not_adopted(
    server: Server, models: Models
) -> None:
    async with publishing(ANY, server, "adopted") as (_, p, fleet):
        report = await p.publish(1, weights(models.seed0))
        post(server, "/pause?mode=keep")
        async with publishing(ANY, server, "adopted") as (_, other, _):
            for step in (1, 2):
                with pytest.raises(genapi.FleetError, match="is paused"):
                    await other.adopt(step)
        (worker,) = (await fleet.snapshot()).workers
        assert (worker.label, worker.paused, worker.healthy) == (report.version.label, True, True)
        post(server, RESUME)


@engine
async def test_a_kept_request_whose_cache_was_kept_rests_on_the_old_weights_and_says_so(
    server: Server, models: Models, oracle: Oracle
) -> None:
    way = Way(ANY.row, options={"in_flight_kv": "stale"})
    async with publishing(way, server, "stale") as (_, p, fleet):
        await p.publish(1, weights(models.seed0))
        async with fleet.stream(request(tokens=3500)) as events:
            await anext(events)
            await p.publish(2, weights(models.seed1))
            last = [event async for event in events][-1]
        assert isinstance(last, genapi.Finished)
        out = last.reply.output
        assert [s.lo.step for s in out.policy.spans if s.lo] == [1, 2]
        assert [s.context.step for s in out.policy.spans if s.context] == [1, 1]
        assert not out.policy.is_pure
        judge = Judge(oracle, {1: models.seed0, 2: models.seed1})
        assert judge.mismatches(last.reply, PROMPT) > 0
        await p.publish(3, weights(models.seed0))


ELSEWHERE = {
    Seen(Op.READ, Observed.DIFFERS, Reached.SENT): (
        test_verification.test_on_a_cpu_the_checksum_sees_embeddings_and_is_blind_for_linear_weights
    ),
    Seen(Op.PROBE, Observed.DONE, Reached.HELD): leads_back,
}


def test_every_row_that_was_run_is_reached_on_a_real_engine() -> None:
    ways = [*WAYS.values(), *RUINS.values(), REJECTED, NOT_HEALED, NOT_FINISHED, NOT_CLOSED]
    reached = {way.row for way in ways} | set(ELSEWHERE)
    assert_reached(ROWS, reached)
