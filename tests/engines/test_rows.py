"""Every row that claims to have been run over gloo, reached through genapi on a real engine.

A publication of seed 1 is made to go wrong; the receipt has to say what the row says; then the way
back that the row names has to lead to exactly the weights of a next publication. The way back of
REPUBLISH is taken straight: the label that would have the worker healed first is written over.
Dynamo's workers are its own vLLM ones.
"""

from __future__ import annotations

import contextlib
import http
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
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
from genapi.providers.dynamo import verdicts as dynamo
from genapi.providers.registry import provider
from genapi.providers.sglang import verdicts as sglang
from genapi.providers.vllm import verdicts as vllm
from genapi.publication.evidence import Observed, Op, Reached, Row, Seen
from genapi.publication.table import Phase
from genapi.testing.contract.meddling import Trouble, goes_to
from genapi.types.worker import Evidence, FenceStrength, PublishReport, Receipt, Recovery
from genapi.wire.http import HTTPCall
from tests.engines.kit.judge import Judge
from tests.engines.kit.meddling import Breaking, at_second_update, meddling
from tests.engines.kit.places import Place, marked, on
from tests.engines.kit.rows import assert_reached
from tests.engines.test_vllm import LIMITS, PROMPT, failed, request, target, weights

if TYPE_CHECKING:
    from tests.engines.conftest import Models, Oracle
    from tests.engines.kit.server import Server

on_engine = (pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio)

BUCKET_TENSORS = 9  # of 27: three buckets
LAYER = "model.layers.1."
FUSED = f"{LAYER}self_attn.q_proj.weight"
WHOLE = f"{LAYER}mlp.down_proj.weight"
"""A parameter that is not fused with others."""
BAD = torch.zeros(3, 3)


def engine(test: Any) -> Any:
    """Mark a test that needs a real engine; the others of this file run everywhere."""
    for mark in on_engine:
        test = mark(test)
    return test


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True)
class Routes:
    """What an engine is asked in a publication: a path, and after it the method that a body names.

    Attributes:
        begin: a session.
        update: take a bucket.
        finish: the session.
        resume: after a pause.
        join: a group.
        label: sets a label.
        somebody: the body for the label of somebody else.
        nothing: the body of a call that says nothing.
    """

    begin: str
    update: str
    finish: str
    resume: str
    join: str
    label: str
    somebody: Mapping[str, object]
    nothing: dict[str, object] | None = field(default_factory=dict)


_RPC = "/engine/update_weights_from_distributed"
ROUTES = {
    "vllm": Routes(
        begin="/start_weight_update",
        update="/update_weights",
        finish="/finish_weight_update",
        resume="/resume",
        join="/init_weight_transfer_engine",
        label="/update_weight_version",
        somebody={"new_version": "somebody"},
        nothing=None,
    ),
    "sglang": Routes(
        begin="/begin_weight_update",
        update="/update_weights_from_distributed",
        finish="/end_weight_update",
        resume="/continue_generation",
        join="/init_weights_update_group",
        label="/update_weight_version",
        somebody={"new_version": "somebody", "abort_all_requests": False},
    ),
    "dynamo": Routes(
        begin=f"{_RPC} start_weight_update",
        update=f"{_RPC} update_info",
        finish=f"{_RPC} finish_weight_update",
        resume="/engine/resume_generation",
        join="/engine/init_weights_update_group init_weight_transfer_engine",
        label="/engine/set_weight_version",
        somebody={"weight_version": "somebody"},
    ),
}
SOURCE = {"vllm": "engine", "sglang": "engine", "dynamo": "inferred"}
"""How a reply knows its versions."""


def ask(server: Server, route: str, **body: object) -> Any:
    """Call a server as somebody else would."""
    path, _, method = route.partition(" ")
    if method:
        body = {"engine_rpc": method, "reset_prefix_cache": False, **body}
    nothing = ROUTES[server.engine.scheme].nothing
    status, reply = server.request("POST", path, body or nothing)
    assert status == http.HTTPStatus.OK, reply
    assert not isinstance(reply, dict) or reply.get("status") != "error", reply
    return reply


def begin(server: Server) -> None:
    ask(server, ROUTES[server.engine.scheme].begin)


def finish(server: Server) -> None:
    ask(server, ROUTES[server.engine.scheme].finish)


def relabel(server: Server) -> None:
    routes = ROUTES[server.engine.scheme]
    ask(server, routes.label, **routes.somebody)


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
    return body | {"update_info": info}


def usual(routes: Routes) -> dict[str, Way]:
    """Ways to rows that every engine has."""
    return {
        "somebody else began": Way(
            Seen(Op.BEGIN, Observed.SESSION_OPEN, Reached.EMPTY), at=Phase.BEGIN, hook=begin
        ),
        "the reply to begin was lost": Way(
            Seen(Op.BEGIN, Observed.LOST, Reached.EMPTY), (Trouble(routes.begin, "lose_reply"),)
        ),
        "the call to begin never arrived": Way(
            Seen(Op.BEGIN, Observed.LOST, Reached.EMPTY), (Trouble(routes.begin, "swallow"),)
        ),
        "the trainer broke in the second bucket": Way(
            Seen(Op.UPDATE, Observed.PEER_LOST, Reached.SENT), breaks="early"
        ),
        "the trainer broke and the reply was lost": Way(
            Seen(Op.UPDATE, Observed.LOST, Reached.SENT),
            (Trouble(routes.update, "lose_reply", nth=2),),
            breaks="early",
        ),
        "somebody else closed the session before the update": Way(
            Seen(Op.UPDATE, Observed.NO_SESSION, Reached.SENT), at=(routes.update, 2), hook=finish
        ),
        "somebody else closed the session before its end": Way(
            Seen(Op.FINISH, Observed.NO_SESSION, Reached.SENT), at=Phase.FINISH, hook=finish
        ),
        "somebody else labelled it before it was read": Way(
            Seen(Op.READ, Observed.OTHER_LABEL, Reached.SENT), at=Phase.VERIFY, hook=relabel
        ),
        "cancelled after begin": Way(
            Seen(Op.CLOSE, Observed.DONE, Reached.EMPTY), at=Phase.BEGIN, error=""
        ),
        "the trainer broke when the second bucket was taken": Way(
            Seen(Op.CLOSE, Observed.DONE, Reached.SENT), breaks="late", error=""
        ),
        "a resume that something in between refused": Way(
            Seen(Op.READ, None, Reached.HELD),
            (Trouble(routes.resume, "error", status=503),),
            error="resume: ",
        ),
        "somebody else labelled it after the resume": Way(
            Seen(Op.PROBE, Observed.OTHER_LABEL, Reached.HELD), at=Phase.PROBE, hook=relabel
        ),
        "scores that are not the trainer's": Way(
            Seen(Op.PROBE, Observed.DIFFERS, Reached.HELD),
            options={"verify": ("probe",)},
            scores=-1.0,
        ),
    }


def of_vllm(routes: Routes) -> dict[str, Way]:
    """Ways to rows of vLLM, whether its own server or Dynamo's worker answers."""
    return {
        "an update that says too little": Way(
            Seen(Op.UPDATE, Observed.REFUSED, Reached.SENT),
            (Trouble(routes.update, "change", nth=2, change=without_shapes),),
        ),
        "the call to finish never arrived": Way(
            Seen(Op.READ, Observed.OTHER_LABEL, Reached.SENT), (Trouble(routes.finish, "swallow"),)
        ),
        "cancelled in the second bucket": Way(
            Seen(Op.UPDATE, Observed.PEER_LOST, Reached.SENT), at=(routes.update, 2)
        ),
        "a finish that arrived twice": Way(
            Seen(Op.READ, None, Reached.HELD),
            (Trouble(routes.finish, "twice"),),
            error="finish: no_session: ",
        ),
    }


def numbered(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"weight_version": 7}


def misdirected(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"group_name": "nope"}


WAYS: dict[str, dict[str, Way]] = {
    "vllm": {
        **usual(ROUTES["vllm"]),
        **of_vllm(ROUTES["vllm"]),
        "a label that is no text": Way(
            Seen(Op.FINISH, Observed.REFUSED, Reached.SENT),
            (Trouble(ROUTES["vllm"].finish, "change", change=numbered),),
        ),
    },
    "sglang": {
        **usual(ROUTES["sglang"]),
        "an update for a group that is not there": Way(
            Seen(Op.UPDATE, Observed.REFUSED, Reached.SENT),
            (Trouble(ROUTES["sglang"].update, "change", nth=2, change=misdirected),),
        ),
        "the reply to an update was lost": Way(
            Seen(Op.UPDATE, Observed.LOST, Reached.SENT),
            (Trouble(ROUTES["sglang"].update, "lose_reply", nth=2),),
        ),
    },
    "dynamo": {**usual(ROUTES["dynamo"]), **of_vllm(ROUTES["dynamo"])},
}
KILLED = {
    "before it was asked to begin": Way(
        Seen(None, Observed.DEAD, Reached.NOT_BEGUN),
        at=Phase.CONFIRM,
        hook=lambda server: server.kill(),
        error="confirm: ",
    ),
    "before the second bucket": Way(
        Seen(None, Observed.DEAD, Reached.SENT),
        at=(ROUTES["sglang"].update, 2),
        hook=lambda server: server.kill(),
        error="update: ",
    ),
}
KILLS = [
    ("vllm", "before it was asked to begin"),
    ("sglang", "before it was asked to begin"),
    ("sglang", "before the second bucket"),
    ("dynamo", "before it was asked to begin"),
]
REJECTED = Way(Seen(Op.UPDATE, Observed.REJECTED, Reached.SENT))
NOT_HEALED = Way(Seen(Op.HEAL, Observed.REJECTED, Reached.NOT_BEGUN))
NOT_FINISHED = Way(Seen(Op.FINISH, Observed.REJECTED, Reached.SENT))
NOT_CLOSED = Way(Seen(Op.CLOSE, Observed.REJECTED, Reached.SENT), breaks="late")

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


def publishing_to(
    way: Way, place: Place, run: str, *, files: genapi.weights.Filesystem | None = None
) -> AbstractAsyncContextManager[tuple[Publication, genapi.WeightPublisher, genapi.Fleet]]:
    """A publication to come, over gloo or through files."""
    return publishing(way, place.server, run, place=place.target, files=files)


async def fails_and_comes_back(  # noqa: PLR0917 - what a test has
    way: Way,
    place: Place,
    run: str,
    models: Models,
    oracle: Oracle,
    files: genapi.weights.Filesystem | None = None,
) -> None:
    """A publication comes to its row, and the way back that the row names leads back."""
    source = SOURCE[place.server.engine.scheme]
    async with publishing_to(way, place, run, files=files) as (publication, p, fleet):
        receipt = await publication.run(p, weights(models.seed1))
        publication.operations.clear()
        if receipt.recovery is Recovery.REPUBLISH:
            relabel(place.server)
        if receipt.recovery is not Recovery.RESTART_THEN_PUBLISH:
            await leads_back(p, fleet, models, oracle, source=source)
            heals = receipt.recovery is Recovery.CLOSE_THEN_REPUBLISH
            assert (Op.HEAL in publication.operations) == heals
            return
        with pytest.raises(genapi.PublishError, match="restart it first"):
            await p.publish(2, weights(models.seed1))
    # Nobody knows whether it has to be restarted: a process that does not know tries to heal it.
    async with publishing_to(ANY, place, "back", files=files) as (again, p, fleet):
        await leads_back(p, fleet, models, oracle, source=source)
        assert Op.HEAL in again.operations


@engine
@pytest.mark.parametrize(
    ("kind", "name"),
    [marked(kind, name) for kind, ways in WAYS.items() for name in ways],
    indirect=["kind"],
)
async def test_a_row_says_what_is_true_of_an_engine_and_its_way_back_leads_back(
    kind: str, name: str, alone: Place, models: Models, oracle: Oracle
) -> None:
    await fails_and_comes_back(WAYS[kind][name], alone, name, models, oracle)


@engine
@pytest.mark.parametrize(
    ("kind", "when"), [marked(kind, when) for kind, when in KILLS], indirect=["kind"]
)
async def test_a_server_that_is_killed_is_dead_and_has_to_be_restarted(
    when: str, own: Place, models: Models
) -> None:
    async with publishing_to(KILLED[when], own, when) as (publication, p, _):
        receipt = await publication.run(p, weights(models.seed1))
        assert receipt.fence is not None
        assert receipt.fence.strength is FenceStrength.DEAD


@engine
@on("vllm", "dynamo")
async def test_a_token_made_in_the_middle_of_an_update_kills_the_engine_and_the_receipt_says_so(
    kind: str, own: Place, models: Models
) -> None:
    routes = ROUTES[kind]

    def resume_and_generate(server: Server) -> None:
        ask(server, routes.resume)
        sampling = {"max_tokens": 4, "temperature": 0}
        if kind == "vllm":
            body: dict[str, object] = {"token_ids": [5], "sampling_params": sampling}
            own.front.request("POST", "/inference/v1/generate", body)
        else:
            body = {"model": "tiny", "prompt": [5], **sampling}
            status, reply = own.front.request("POST", "/v1/completions", body)
            assert status != http.HTTPStatus.OK, reply
        server.process.wait(60)

    dead = Seen(None, Observed.DEAD, Reached.SENT)
    way = Way(dead, at=(routes.update, 2), hook=resume_and_generate, error="update: ")
    async with publishing_to(way, own, "token") as (publication, p, _):
        receipt = await publication.run(p, weights(models.seed1))
        assert receipt.fence is not None
        assert receipt.fence.strength is FenceStrength.DEAD


@engine
@on("vllm", "dynamo")
@pytest.mark.parametrize("way", [NOT_FINISHED, NOT_CLOSED], ids=["finish", "close"])
async def test_a_rejected_tensor_is_replayed_whenever_a_session_is_closed(
    way: Way, own: Place, models: Models
) -> None:
    tensors = load_file(models.seed1 / "model.safetensors")
    bad = genapi.weights.from_tensors(tensors | {FUSED: BAD})
    # What is not of the layer with the bad tensor can be sent, label and all.
    others = genapi.weights.from_tensors({n: t for n, t in tensors.items() if LAYER not in n})
    async with publishing_to(REJECTED, own, "rejected") as (publication, p, _):
        await publication.run(p, bad)
    relabel(own.server)
    async with publishing_to(way, own, "relabelled") as (publication, p, _):
        await publication.run(p, others)
        assert Op.HEAL not in publication.operations
    async with publishing_to(NOT_HEALED, own, "healing") as (publication, p, _):
        await publication.run(p, others)
        assert Op.RESUME not in publication.operations
    # Closing failed, so the session is open still.
    path, _, method = ROUTES[own.server.engine.scheme].begin.partition(" ")
    _, reply = own.server.request("POST", path, {"engine_rpc": method} if method else None)
    assert "already active" in str(reply)


@engine
@on("sglang")
async def test_weights_that_a_rejected_tensor_left_half_written_are_healed_by_a_full_session(
    alone: Place, models: Models, oracle: Oracle
) -> None:
    tensors = load_file(models.seed1 / "model.safetensors")
    bad = genapi.weights.from_tensors(tensors | {WHOLE: BAD})
    async with publishing_to(REJECTED, alone, "rejected") as (publication, p, fleet):
        await publication.run(p, bad)
        await leads_back(p, fleet, models, oracle)


@engine
@on("vllm", "dynamo")
async def test_both_replies_lost_are_decided_by_the_label_that_is_read_back(
    kind: str, alone: Place, models: Models, oracle: Oracle
) -> None:
    routes = ROUTES[kind]
    troubles = Trouble(routes.update, "lose_reply", nth=3), Trouble(routes.finish, "lose_reply")
    async with publishing_to(Way(ANY.row, troubles), alone, "both") as (_, p, fleet):
        report = await p.publish(1, weights(models.seed1))
        assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED]
        assert [r.evidence for r in report.receipts] == [Evidence.OWN_LABEL]
        judge = Judge(oracle, {1: models.seed1})
        judge.check(await fleet.generate(request()), PROMPT, source=SOURCE[kind])
        judge.close()
        await p.publish(2, weights(models.seed0))


# SGLang refuses a group that is there already, and what was swallowed gets no answer.
NOT_JOINED = {
    "sglang": (Trouble(ROUTES["sglang"].join, "twice"), "group name has already been created"),
    "dynamo": (Trouble(ROUTES["dynamo"].join, "swallow"), "join: lost: "),
}


@engine
@on(*NOT_JOINED)
async def test_a_worker_that_did_not_join_is_untouched_and_serves(
    kind: str, alone: Place, models: Models, oracle: Oracle
) -> None:
    trouble, error = NOT_JOINED[kind]
    async with publishing_to(Way(ANY.row, (trouble,)), alone, "joining") as (_, p, fleet):
        report = await failed(p, 1, weights(models.seed1))
        (receipt,) = report.receipts
        assert receipt.outcome is Outcome.UNTOUCHED
        assert error in (receipt.error or "")
        assert (await fleet.generate(request())).output.is_complete
        await leads_back(p, fleet, models, oracle, source=SOURCE[kind])


@engine
@on("vllm")
async def test_an_empty_session_moves_the_label_and_no_weights(
    alone: Place, models: Models, oracle: Oracle
) -> None:
    async with publishing_to(ANY, alone, "empty") as (_, p, fleet):
        await p.publish(1, weights(models.seed0))
        version = PolicyVersion(run="empty", step=2)
        ask(alone.server, "/pause?mode=keep")
        begin(alone.server)
        ask(alone.server, ROUTES["vllm"].finish, weight_version=version.label)
        ask(alone.server, ROUTES["vllm"].resume)
        assert [w.version for w in (await fleet.snapshot()).workers] == [version]
        reply = await fleet.generate(request())
        assert reply.output.policy.oldest == version
        assert Judge(oracle, {2: models.seed0}).mismatches(reply, PROMPT) == 0
        assert Judge(oracle, {2: models.seed1}).mismatches(reply, PROMPT) > 0


@engine
@on("vllm")
async def test_a_label_moved_while_a_request_runs_is_a_boundary_though_no_weight_moved(
    alone: Place, models: Models, oracle: Oracle
) -> None:
    async with publishing_to(ANY, alone, "moved") as (_, p, fleet):
        await p.publish(1, weights(models.seed0))
        label = PolicyVersion(run="moved", step=2).label
        async with fleet.stream(request(tokens=2000)) as events:
            await anext(events)
            ask(alone.server, ROUTES["vllm"].label, new_version=label)
            last = [event async for event in events][-1]
        assert isinstance(last, genapi.Finished)
        assert [s.lo.step for s in last.reply.output.policy.spans if s.lo] == [1, 2]
        judge = Judge(oracle, {1: models.seed0, 2: models.seed0})
        assert judge.mismatches(last.reply, PROMPT) == 0


@engine
@on("vllm")
async def test_a_paused_server_with_an_old_label_is_not_adopted(
    alone: Place, models: Models
) -> None:
    async with publishing_to(ANY, alone, "adopted") as (_, p, fleet):
        report = await p.publish(1, weights(models.seed0))
        ask(alone.server, "/pause?mode=keep")
        async with publishing_to(ANY, alone, "adopted") as (_, other, _):
            for step in (1, 2):
                with pytest.raises(genapi.FleetError, match="is paused"):
                    await other.adopt(step)
        (worker,) = (await fleet.snapshot()).workers
        assert (worker.label, worker.paused, worker.healthy) == (report.version.label, True, True)
        ask(alone.server, ROUTES["vllm"].resume)


@engine
@on("vllm")
async def test_a_kept_request_whose_cache_was_kept_rests_on_the_old_weights_and_says_so(
    alone: Place, models: Models, oracle: Oracle
) -> None:
    way = Way(ANY.row, options={"in_flight_kv": "stale"})
    async with publishing_to(way, alone, "stale") as (_, p, fleet):
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


TABLES: dict[str, tuple[Row, ...]] = {
    "vllm": vllm.ROWS,
    "sglang": sglang.ROWS,
    "dynamo": dynamo.ROWS,
}
REPLAYED = {REJECTED.row, NOT_HEALED.row, NOT_FINISHED.row, NOT_CLOSED.row}
CHECKSUM = {Seen(Op.READ, Observed.DIFFERS, Reached.SENT)}
"""Reached by tests of the checksum: `test_verification.py`, `test_sglang.py`."""
ELSEWHERE = {
    "vllm": REPLAYED | CHECKSUM,
    "sglang": {REJECTED.row} | CHECKSUM,
    "dynamo": REPLAYED,
}


@pytest.mark.parametrize("name", TABLES)
def test_every_row_that_was_run_is_reached_on_a_real_engine(name: str) -> None:
    every_publication = Seen(Op.PROBE, Observed.DONE, Reached.HELD)
    reached = {way.row for way in WAYS[name].values()} | ELSEWHERE[name] | {every_publication}
    assert_reached(TABLES[name], reached)
