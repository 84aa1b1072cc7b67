"""Every row that claims to have been run on Dynamo, reached through genapi on a real vLLM worker.

As `test_rows.py` does it for vLLM's own servers.
"""

from __future__ import annotations

import contextlib
import http
import pathlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import genapi
from genapi import Outcome
from genapi.providers.dynamo import files as dynamo_files
from genapi.providers.dynamo.verdicts import ROWS
from genapi.publication.evidence import Observed, Op, Reached, Seen
from genapi.publication.table import Phase
from genapi.testing.contract.meddling import Trouble
from genapi.types.worker import Evidence, FenceStrength, Recovery
from genapi.weights import Filesystem
from tests.engines.kit.dynamo.deployment import VLLM_WORKER, Deployment
from tests.engines.kit.judge import Judge
from tests.engines.kit.rows import assert_reached
from tests.engines.test_filesystem import SHARD, cases_of, fails_and_comes_back, ruins_of
from tests.engines.test_rows import (
    ANY,
    FUSED,
    LAYER,
    Publication,
    Way,
    engine,
    leads_back,
    publishing,
    without_shapes,
)
from tests.engines.test_vllm import PROMPT, failed, request, weights

if TYPE_CHECKING:
    from tests.engines.conftest import Deploy, Models, Oracle
    from tests.engines.kit.server import Server

pytestmark = pytest.mark.long

RPC = "/engine/update_weights_from_distributed"
START, UPDATE = f"{RPC} start_weight_update", f"{RPC} update_info"
FINISH, RESUME = f"{RPC} finish_weight_update", "/engine/resume_generation"
LABEL, INIT = "/engine/set_weight_version", "/engine/init_weights_update_group"
JOIN = f"{INIT} init_weight_transfer_engine"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def deployed(deploy: Deploy) -> Iterator[Deployment]:
    with deploy(VLLM_WORKER) as deployment:
        yield deployment


@pytest.fixture
def alone(deployed: Deployment) -> Deployment:
    """A frontend and one vLLM worker; a test leaves it serving, or dead."""
    for server in [s for s in deployed.workers if s.process.poll() is not None]:
        deployed.kill(server)
    if not deployed.workers:
        deployed.start(VLLM_WORKER)
    deployed.wait()
    return deployed


def ask(server: Server, path: str, **body: object) -> Any:
    """Call a worker as somebody else would."""
    route, _, method = path.partition(" ")
    if method:
        body = {"engine_rpc": method, "reset_prefix_cache": False, **body}
    status, reply = server.request("POST", route, body)
    assert status == http.HTTPStatus.OK, reply
    assert reply["status"] == "ok", reply
    return reply


def relabel(server: Server) -> None:
    ask(server, LABEL, weight_version="somebody")


@contextlib.asynccontextmanager
async def publishing_to(
    way: Way, deployment: Deployment, run: str, *, files: Filesystem | None = None
) -> AsyncIterator[tuple[Publication, genapi.WeightPublisher, genapi.Fleet]]:
    """A publication to come to the only worker, and its publisher."""
    (server,) = deployment.workers
    async with publishing(way, server, run, place=deployment.target, files=files) as everything:
        yield everything


async def comes_back(
    p: genapi.WeightPublisher, fleet: genapi.Fleet, models: Models, oracle: Oracle
) -> None:
    await leads_back(p, fleet, models, oracle, source="inferred")


def without_shapes_of(body: dict[str, Any]) -> dict[str, Any]:
    return body | without_shapes(body)


WAYS: dict[str, Way] = {
    "somebody else began": Way(
        Seen(Op.BEGIN, Observed.SESSION_OPEN, Reached.EMPTY),
        at=Phase.BEGIN,
        hook=lambda server: ask(server, START),
    ),
    "the reply to begin was lost": Way(
        Seen(Op.BEGIN, Observed.LOST, Reached.EMPTY), (Trouble(START, "lose_reply"),)
    ),
    "the call to begin never arrived": Way(
        Seen(Op.BEGIN, Observed.LOST, Reached.EMPTY), (Trouble(START, "swallow"),)
    ),
    "an update that says too little": Way(
        Seen(Op.UPDATE, Observed.REFUSED, Reached.SENT),
        (Trouble(UPDATE, "change", nth=2, change=without_shapes_of),),
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
        hook=lambda server: ask(server, FINISH),
    ),
    "somebody else closed the session before the label": Way(
        Seen(Op.FINISH, Observed.NO_SESSION, Reached.SENT),
        at=Phase.FINISH,
        hook=lambda server: ask(server, FINISH),
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
REJECTED = Way(Seen(Op.UPDATE, Observed.REJECTED, Reached.SENT))
NOT_HEALED = Way(Seen(Op.HEAL, Observed.REJECTED, Reached.NOT_BEGUN))
REFUSED = Way(Seen(Op.HEAL, Observed.REFUSED, Reached.NOT_BEGUN))
NOT_FINISHED = Way(Seen(Op.FINISH, Observed.REJECTED, Reached.SENT))
NOT_CLOSED = Way(Seen(Op.CLOSE, Observed.REJECTED, Reached.SENT), breaks="late")


@engine
@pytest.mark.parametrize("name", WAYS)
async def test_a_row_says_what_is_true_of_dynamo_and_its_way_back_leads_back(
    name: str, alone: Deployment, models: Models, oracle: Oracle
) -> None:
    (server,) = alone.workers
    async with publishing_to(WAYS[name], alone, name) as (publication, p, fleet):
        receipt = await publication.run(p, weights(models.seed1))
        publication.operations.clear()
        if receipt.recovery is Recovery.REPUBLISH:
            relabel(server)
        if receipt.recovery is not Recovery.RESTART_THEN_PUBLISH:
            await comes_back(p, fleet, models, oracle)
            heals = receipt.recovery is Recovery.CLOSE_THEN_REPUBLISH
            assert (Op.HEAL in publication.operations) == heals
            return
        with pytest.raises(genapi.PublishError, match="restart it first"):
            await p.publish(2, weights(models.seed1))
    # Nobody knows whether it has to be restarted: a process that does not know tries to heal it.
    async with publishing_to(ANY, alone, "back") as (again, p, fleet):
        await comes_back(p, fleet, models, oracle)
        assert Op.HEAL in again.operations


@engine
async def test_a_worker_killed_before_it_was_asked_to_begin_is_dead_and_has_to_be_restarted(
    alone: Deployment, models: Models
) -> None:
    (server,) = alone.workers
    way = Way(
        Seen(None, Observed.DEAD, Reached.NOT_BEGUN),
        at=Phase.CONFIRM,
        hook=lambda worker: worker.kill(),
        error="confirm: ",
    )
    async with publishing_to(way, alone, "before") as (publication, p, _):
        receipt = await publication.run(p, weights(models.seed1))
        assert receipt.fence is not None
        assert receipt.fence.strength is FenceStrength.DEAD
    alone.kill(server)


def resume_and_generate(deployment: Deployment, server: Server) -> None:
    """Resume a worker in the middle of its session, and have it make a token."""
    ask(server, RESUME)
    body = {"model": "tiny", "prompt": [5], "max_tokens": 4}
    status, reply = deployment.frontend.request("POST", "/v1/completions", body)
    assert status != http.HTTPStatus.OK, reply
    server.process.wait(60)


@engine
async def test_a_token_made_in_the_middle_of_an_update_kills_the_worker_and_the_receipt_says_so(
    alone: Deployment, models: Models
) -> None:
    (server,) = alone.workers
    way = Way(
        Seen(None, Observed.DEAD, Reached.SENT),
        at=(UPDATE, 2),
        hook=lambda worker: resume_and_generate(alone, worker),
        error="update: ",
    )
    async with publishing_to(way, alone, "token") as (publication, p, _):
        receipt = await publication.run(p, weights(models.seed1))
        assert receipt.fence is not None
        assert receipt.fence.strength is FenceStrength.DEAD
    alone.kill(server)


@engine
@pytest.mark.parametrize("way", [NOT_FINISHED, NOT_CLOSED], ids=["finish", "close"])
async def test_a_rejected_tensor_is_replayed_by_dynamo_whenever_a_session_is_closed(
    way: Way, alone: Deployment, models: Models
) -> None:
    (server,) = alone.workers
    tensors = load_file(models.seed1 / "model.safetensors")
    bad = genapi.weights.from_tensors(tensors | {FUSED: torch.zeros(3, 3)})
    # What is not of the layer with the bad tensor can be sent, label and all.
    others = genapi.weights.from_tensors({n: t for n, t in tensors.items() if LAYER not in n})
    async with publishing_to(REJECTED, alone, "rejected") as (publication, p, _):
        await publication.run(p, bad)
    relabel(server)
    async with publishing_to(way, alone, "relabelled") as (publication, p, _):
        await publication.run(p, others)
        assert Op.HEAL not in publication.operations
    async with publishing_to(NOT_HEALED, alone, "healing") as (publication, p, _):
        await publication.run(p, others)
        assert Op.RESUME not in publication.operations
    # Closing failed, so the session is open still.
    _, reply = server.request("POST", RPC, {"engine_rpc": "start_weight_update"})
    assert "already active" in str(reply)
    alone.kill(server)


@engine
async def test_a_call_to_join_that_got_no_answer_leaves_the_worker_untouched(
    alone: Deployment, models: Models, oracle: Oracle
) -> None:
    swallowed = Way(ANY.row, (Trouble(JOIN, "swallow"),))
    async with publishing_to(swallowed, alone, "joining") as (_, p, fleet):
        report = await failed(p, 1, weights(models.seed1))
        (receipt,) = report.receipts
        assert receipt.outcome is Outcome.UNTOUCHED
        assert (receipt.error or "").startswith("join: lost: ")
        assert (await fleet.generate(request())).output.is_complete
        await comes_back(p, fleet, models, oracle)


@engine
async def test_both_replies_lost_are_decided_by_the_label_that_dynamo_reads_back(
    alone: Deployment, models: Models, oracle: Oracle
) -> None:
    lost = Way(
        ANY.row,
        (
            Trouble(UPDATE, "lose_reply", nth=3),
            Trouble(FINISH, "lose_reply"),
        ),
    )
    async with publishing_to(lost, alone, "both") as (_, p, fleet):
        report = await p.publish(1, weights(models.seed1))
        assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED]
        assert [r.evidence for r in report.receipts] == [Evidence.OWN_LABEL]
        judge = Judge(oracle, {1: models.seed1})
        judge.check(await fleet.generate(request()), PROMPT, source="inferred")
        judge.close()
        await p.publish(2, weights(models.seed0))


# Weights through files.

LOAD = "/engine/update_weights_from_disk reload_weights"
CASES = cases_of(LOAD, RESUME, relabel, outlives_cuts=True)
RUINS = ruins_of(LOAD)


@engine
@pytest.mark.parametrize("what", CASES)
async def test_a_row_says_what_is_true_of_a_load_by_dynamo_and_its_way_back_leads_back(
    what: str, alone: Deployment, models: Models, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    (server,) = alone.workers
    files = Filesystem(tmp_path, shard_bytes=SHARD)
    opened = publishing_to(CASES[what].way_in(tmp_path), alone, what, files=files)
    await fails_and_comes_back(opened, partial(relabel, server), models, oracle, source="inferred")


@engine
@pytest.mark.parametrize("what", RUINS)
async def test_a_worker_of_dynamo_that_is_gone_in_a_load_is_dead_and_has_to_be_restarted(
    what: str, alone: Deployment, models: Models, tmp_path: pathlib.Path
) -> None:
    (server,) = alone.workers
    files = Filesystem(tmp_path / "w")
    async with publishing_to(RUINS[what], alone, what, files=files) as (publication, p, _):
        receipt = await publication.run(p, weights(models.seed1))
        assert receipt.fence is not None
        assert receipt.fence.strength is FenceStrength.DEAD
    alone.kill(server)


@engine
async def test_a_tensor_of_another_shape_is_rejected_by_dynamo_and_healed_by_nothing(
    alone: Deployment, models: Models, tmp_path: pathlib.Path
) -> None:
    (server,) = alone.workers
    tensors = load_file(models.seed1 / "model.safetensors")
    bad = genapi.weights.from_tensors(tensors | {FUSED: torch.zeros(3, 3)})
    files = Filesystem(tmp_path / "w")
    async with publishing_to(REJECTED, alone, "shape", files=files) as (publication, p, _):
        await publication.run(p, bad)
    # A process that does not know what happened tries to heal it, and learns of it.
    async with publishing_to(NOT_HEALED, alone, "unhealed", files=files) as (publication, p, _):
        await publication.run(p, weights(models.seed1))
    alone.kill(server)


@engine
async def test_dynamo_without_weight_transfer_loads_files_exactly_but_cannot_be_healed(
    deploy: Deploy, models: Models, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    def plain(model: pathlib.Path) -> Sequence[str]:
        return [flag for flag in VLLM_WORKER.flags(model) if "weight-transfer" not in flag]

    lost = Way(Seen(Op.UPDATE, Observed.LOST, Reached.SENT), (Trouble(LOAD, "lose_reply"),))
    files = Filesystem(tmp_path / "w")
    with deploy(replace(VLLM_WORKER, flags=plain)) as deployment:
        async with publishing_to(ANY, deployment, "plain", files=files) as (_, p, fleet):
            await comes_back(p, fleet, models, oracle)
        async with publishing_to(lost, deployment, "lost", files=files) as (publication, p, _):
            await publication.run(p, weights(models.seed1))
        async with publishing_to(REFUSED, deployment, "no", files=files) as (publication, p, _):
            receipt = await publication.run(p, weights(models.seed1))
            assert "--weight-transfer-config" in (receipt.error or "")


ELSEWHERE = {
    Seen(Op.PROBE, Observed.DONE, Reached.HELD): "every publication",
    Seen(None, Observed.DEAD, Reached.NOT_BEGUN): "a worker that was killed",
    Seen(None, Observed.DEAD, Reached.SENT): "a token in the middle of an update",
}


def test_every_row_that_was_run_is_reached_on_a_real_dynamo() -> None:
    ways = [*WAYS.values(), REJECTED, NOT_HEALED, NOT_FINISHED, NOT_CLOSED]
    reached = {way.row for way in ways} | set(ELSEWHERE)
    assert_reached(ROWS, reached)


def test_every_row_of_files_that_was_run_is_reached_on_a_real_dynamo() -> None:
    ways = [*(case.way for case in CASES.values()), *RUINS.values(), REJECTED, NOT_HEALED, REFUSED]
    reached = {way.row for way in ways} | {Seen(Op.PROBE, Observed.DONE, Reached.HELD)}
    assert_reached(dynamo_files.ROWS, reached)
