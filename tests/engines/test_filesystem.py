"""Publications through files to real engines: exact weights, and what a failed load leaves.

The weights that are published are read by `transformers` from the very directory that the engine
loaded. Rows are reached as in `test_rows.py`: a publication goes wrong, the receipt says what the
row says, and the way back leads to exactly the weights of the next publications.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest
import torch
from safetensors.torch import load_file

import genapi
from genapi import Outcome
from genapi.providers.dynamo import files as dynamo_files
from genapi.providers.sglang import files as sglang_files
from genapi.providers.vllm import files as vllm_files
from genapi.publication.evidence import Observed, Op, Reached, Row, Seen
from genapi.publication.table import Phase
from genapi.testing.contract.meddling import Trouble
from genapi.types.worker import FenceStrength
from genapi.weights import Filesystem
from tests.engines.conftest import environment
from tests.engines.kit.dynamo.deployment import VLLM_WORKER
from tests.engines.kit.judge import FEW, Judge
from tests.engines.kit.places import Place, on, place_in
from tests.engines.kit.rows import assert_reached
from tests.engines.kit.server import VLLM, Server, serving
from tests.engines.kit.sglang.engine import SGLANG
from tests.engines.test_exact import there_and_back
from tests.engines.test_rows import (
    ANY,
    BAD,
    FUSED,
    ROUTES,
    SOURCE,
    Way,
    fails_and_comes_back,
    leads_back,
    publishing_to,
    relabel,
)
from tests.engines.test_vllm import LIMITS, PROMPT, everywhere, failed, request, target, weights
from tests.support.weight_sources import PATIENCE_S

if TYPE_CHECKING:
    from genapi.weights import TensorMeta, WeightSource
    from tests.engines.conftest import Models, Oracle

on_engine = (pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio)

NAMES = ("vllm", "sglang")
LOAD = {
    "vllm": "/collective_rpc",
    "sglang": "/update_weights_from_disk",
    "dynamo": "/engine/update_weights_from_disk reload_weights",
}
SHARD = 200_000  # bytes, of some 2 million: several files


def engine(test: Any) -> Any:
    """Mark a test that needs a real engine; the others of this file run everywhere."""
    for mark in on_engine:
        test = mark(test)
    return test


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """An engine that is installed."""
    environment(request.param)
    return str(request.param)


@pytest.fixture
def pair(name: str, request: pytest.FixtureRequest) -> Sequence[Server]:
    """Two servers of seed 0, which a test leaves serving seed 0."""
    servers: Sequence[Server] = request.getfixturevalue(f"{name}_pair")
    return servers


class Held:
    """Weights whose last tensor comes when it is released.

    Of writing files little is left then: the reply that begins meanwhile is not over before them.
    """

    def __init__(self, source: WeightSource) -> None:
        self.reached, self.release = threading.Event(), threading.Event()
        self._source = source

    def manifest(self) -> Sequence[TensorMeta]:
        return self._source.manifest()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        last = len(self.manifest()) - 1
        for number, tensor in enumerate(self._source):
            if number == last:
                self.reached.set()
                assert self.release.wait(PATIENCE_S)
            yield tensor


@engine
async def test_published_files_are_served_exactly_and_the_first_weights_come_back(
    name: str, pair: Sequence[Server], models: Models, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "there").symlink_to(tmp_path / "here")
    transport = Filesystem(
        tmp_path / "here",
        worker_dir=str(tmp_path / "there"),
        base=models.seed0,
        keep=2,
        shard_bytes=SHARD,
    )
    run = f"files-{name}"
    folders = {step: tmp_path / "here" / f"{run}-{step}-1" for step in (1, 2)}
    async with genapi.connect(target(*pair), run=run) as fleet:
        await fleet.wait_ready(timeout_s=60)
        judge = Judge(oracle, {0: models.seed0, **folders})
        async with genapi.WeightPublisher(fleet, transport=transport, timeouts=LIMITS) as p:
            await p.adopt(0)
            first = await everywhere(fleet)
            held = Held(weights(models.seed1))
            async with anyio.create_task_group() as group:
                group.start_soon(partial(there_and_back, fleet, p, models, judge, there=held))
                assert await anyio.to_thread.run_sync(held.reached.wait, PATIENCE_S)
                async with fleet.stream(request(tokens=3500)) as events:
                    await anext(events)
                    held.release.set()
                    kept = [event async for event in events][-1]
            assert isinstance(kept, genapi.Finished)
            whole = Judge(oracle, judge.folders)  # of one long reply a few ties are to be expected
            whole.check(kept.reply, PROMPT)
            assert whole.ties < FEW
            assert [s.lo.step for s in kept.reply.output.policy.spans if s.lo] in (
                [0, 1],
                [0, 1, 2],
            )
            last = await everywhere(fleet)
            assert {r.output.token_ids for r in last} == {r.output.token_ids for r in first}
        judge.close()
    names = sorted(path.name for path in folders[1].iterdir())
    assert names[0] == "STABLE"
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(names)


@engine
@pytest.mark.long
async def test_replicas_of_sglang_are_published_to_through_files(
    models: Models, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    binds = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": ""}
    settings = {**SGLANG.fields["environment"], **binds}
    two = replace(SGLANG, fields={**SGLANG.fields, "environment": settings})
    place = environment("sglang")
    with serving(
        place, models.seed0, folder=tmp_path / "logs", flags=["--dp-size=2"], engine=two
    ) as servers:
        async with genapi.connect(target(*servers), run="replicas") as fleet:
            await fleet.wait_ready(timeout_s=60)
            judge = Judge(oracle, {1: models.seed1, 2: models.seed0})
            transport = Filesystem(tmp_path / "w", shard_bytes=SHARD)
            async with genapi.WeightPublisher(fleet, transport=transport, timeouts=LIMITS) as p:
                for step, folder in ((1, models.seed1), (2, models.seed0)):
                    report = await p.publish(step, weights(folder))
                    assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED]
                    for number in range(6):  # the replicas take turns
                        reply = await fleet.generate(request(session=str(number)))
                        assert reply.output.policy.oldest == report.version
                        judge.check(reply, PROMPT)
            judge.close()


# Rows of the evidence tables.


@dataclass(frozen=True)
class Case:
    """A way to a row, and what is done to the files or to the source on it.

    Attributes:
        way: of the publication.
        cut: which of the files loses its end when the engine is about to load; None = none.
    """

    way: Way
    cut: int | None = None

    def way_in(self, folder: pathlib.Path) -> Way:
        """The way of a publication through files in that folder, the only one in it."""
        if self.cut is None:
            return self.way
        place = self.cut

        def cut(_: Server) -> None:
            (version,) = folder.glob("[!.]*")
            file = sorted(version.glob("*.safetensors"))[place]
            file.write_bytes(file.read_bytes()[:-1000])

        return replace(self.way, at=Phase.BEGIN, hook=cut)


def elsewhere(body: dict[str, Any]) -> dict[str, Any]:
    """The load of a directory that is not there."""
    if "kwargs" in body:
        return body | {"kwargs": body["kwargs"] | {"weights_path": "/nowhere/at/all"}}
    return body | {"model_path": "/nowhere/at/all"}


def cases(kind: str) -> dict[str, Case]:
    """What goes wrong with a server and can be healed."""
    load = LOAD[kind]
    unreadable = Seen(Op.UPDATE, Observed.UNREADABLE, Reached.SENT)
    found = {
        "a directory that the worker does not have": Case(
            Way(unreadable, (Trouble(load, "change", change=elsewhere),))
        ),
        "the answer to the load was lost": Case(
            Way(
                Seen(Op.UPDATE, Observed.LOST, Reached.SENT),
                (Trouble(load, "lose_reply"),),
            )
        ),
        "the load never arrived": Case(
            Way(
                Seen(Op.UPDATE, Observed.LOST, Reached.SENT),
                (Trouble(load, "swallow"),),
            )
        ),
        "cancelled before the load": Case(
            Way(Seen(Op.CLOSE, Observed.DONE, Reached.EMPTY), at=Phase.BEGIN, error="")
        ),
        "cancelled while it loads": Case(
            Way(Seen(Op.CLOSE, Observed.DONE, Reached.SENT), at=(load, 1), error="")
        ),
        "somebody else labelled it before it was read": Case(
            Way(
                Seen(Op.READ, Observed.OTHER_LABEL, Reached.SENT),
                at=Phase.VERIFY,
                hook=relabel,
            )
        ),
        "a resume that something in between refused": Case(
            Way(
                Seen(Op.READ, None, Reached.HELD),
                (Trouble(ROUTES[kind].resume, "error", status=503),),
                error="resume: ",
            )
        ),
        "somebody else labelled it after the resume": Case(
            Way(Seen(Op.PROBE, Observed.OTHER_LABEL, Reached.HELD), at=Phase.PROBE, hook=relabel)
        ),
        "scores that are not the trainer's": Case(
            Way(
                Seen(Op.PROBE, Observed.DIFFERS, Reached.HELD),
                options={"verify": ("probe",)},
                scores=-1.0,
            )
        ),
    }
    if kind != "sglang":  # which goes down with such a file
        found["a first file that is cut short"] = Case(Way(unreadable), cut=0)
        found["a last file that is cut short"] = Case(Way(unreadable), cut=-1)
    return found


def kill(server: Server) -> None:
    os.killpg(server.pid, signal.SIGKILL)


def ruins(kind: str) -> dict[str, Way]:
    """What kills a server that is told to load."""
    return {
        "killed before it was asked to begin": Way(
            Seen(None, Observed.DEAD, Reached.NOT_BEGUN),
            at=Phase.CONFIRM,
            hook=kill,
            error="confirm: ",
        ),
        "killed before the load": Way(
            Seen(None, Observed.DEAD, Reached.SENT), at=(LOAD[kind], 1), hook=kill, error="update: "
        ),
    }


REJECTED = Way(Seen(Op.UPDATE, Observed.REJECTED, Reached.SENT))
NOT_HEALED = Way(Seen(Op.HEAL, Observed.REJECTED, Reached.NOT_BEGUN))
REFUSED = Way(Seen(Op.HEAL, Observed.REFUSED, Reached.NOT_BEGUN))


@engine
@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "what"), [(kind, what) for kind in LOAD for what in cases(kind)], indirect=["kind"]
)
async def test_a_row_says_what_is_true_of_a_load_and_its_way_back_leads_back(  # noqa: PLR0917 - pytest
    kind: str, what: str, alone: Place, models: Models, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    files = Filesystem(tmp_path, shard_bytes=SHARD)
    way = cases(kind)[what].way_in(tmp_path)
    await fails_and_comes_back(way, alone, what, models, oracle, files)


@engine
@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "what"), [(kind, what) for kind in LOAD for what in ruins(kind)], indirect=["kind"]
)
async def test_a_server_that_is_gone_in_a_load_is_dead_and_has_to_be_restarted(
    kind: str, what: str, own: Place, models: Models, tmp_path: pathlib.Path
) -> None:
    files = Filesystem(tmp_path / "w")
    async with publishing_to(ruins(kind)[what], own, what, files=files) as (publication, p, _):
        receipt = await publication.run(p, weights(models.seed1))
        assert receipt.fence is not None
        assert receipt.fence.strength is FenceStrength.DEAD


@engine
@pytest.mark.long
@on("vllm", "dynamo")
async def test_a_tensor_of_another_shape_is_rejected_by_vllm_and_healed_by_nothing(
    own: Place, models: Models, tmp_path: pathlib.Path
) -> None:
    tensors = load_file(models.seed1 / "model.safetensors")
    bad = genapi.weights.from_tensors(tensors | {FUSED: BAD})
    files = Filesystem(tmp_path / "w")
    async with publishing_to(REJECTED, own, "rejected", files=files) as (publication, p, _):
        await publication.run(p, bad)
    # A process that does not know what happened tries to heal it, and learns of it.
    async with publishing_to(NOT_HEALED, own, "healing", files=files) as (publication, p, _):
        await publication.run(p, weights(models.seed1))


@contextlib.contextmanager
def without_sessions(
    kind: str, fixtures: pytest.FixtureRequest, models: Models, folder: pathlib.Path
) -> Iterator[Place]:
    """A server of vLLM, or a worker of Dynamo, without weight transfer."""

    if kind == "dynamo":

        def plain(model: pathlib.Path) -> Sequence[str]:
            return [flag for flag in VLLM_WORKER.flags(model) if "weight-transfer" not in flag]

        with fixtures.getfixturevalue("deploy")(replace(VLLM_WORKER, flags=plain)) as deployment:
            yield place_in(deployment)
        return
    server_kind = replace(VLLM, fields={**VLLM.fields, "weight_backend": None})
    started = serving(environment(kind), models.seed0, folder=folder / "log", engine=server_kind)
    with started as (server,):
        yield Place(server, target(server), server)


@engine
@pytest.mark.long
@on("vllm", "dynamo")
async def test_vllm_without_weight_transfer_loads_files_exactly_but_cannot_be_healed(
    kind: str,
    models: Models,
    oracle: Oracle,
    tmp_path: pathlib.Path,
    request: pytest.FixtureRequest,
) -> None:
    lost = Way(Seen(Op.UPDATE, Observed.LOST, Reached.SENT), (Trouble(LOAD[kind], "lose_reply"),))
    files = Filesystem(tmp_path / "w")
    with without_sessions(kind, request, models, tmp_path) as place:
        async with publishing_to(ANY, place, "plain", files=files) as (_, p, fleet):
            await leads_back(p, fleet, models, oracle, source=SOURCE[kind])
        async with publishing_to(lost, place, "lost", files=files) as (publication, p, _):
            await publication.run(p, weights(models.seed1))
        async with publishing_to(REFUSED, place, "refused", files=files) as (publication, p, _):
            receipt = await publication.run(p, weights(models.seed1))
            assert "--weight-transfer-config" in (receipt.error or "")


@engine
@pytest.mark.long
@on("sglang")
async def test_a_file_that_cannot_be_read_takes_sglang_down_and_nobody_calls_it_healthy(
    own: Place, models: Models, tmp_path: pathlib.Path
) -> None:
    way = Way(
        ANY.row,
        at=Phase.BEGIN,
        hook=lambda _: os.truncate(tmp_path / "w" / "cut-1-1" / "model.safetensors", 100),
    )
    files = Filesystem(tmp_path / "w")
    async with publishing_to(way, own, "cut", files=files) as (_, p, _):
        report = await failed(p, 1, weights(models.seed1))
        (receipt,) = report.receipts
        assert receipt.outcome is Outcome.UNKNOWN
        assert receipt.fence is not None
    await anyio.to_thread.run_sync(own.server.process.wait, 120)


@engine
@pytest.mark.long
@on("sglang")
async def test_a_name_that_sglang_does_not_know_is_ignored_in_files_as_well(
    alone: Place, models: Models, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    tensors = load_file(models.seed1 / "model.safetensors")
    more = genapi.weights.from_tensors(tensors | {"model.other.weight": torch.zeros(2)})
    async with publishing_to(ANY, alone, "unknown", files=Filesystem(tmp_path)) as (_, p, fleet):
        assert (await p.publish(1, more)).committed
        judge = Judge(oracle, {1: models.seed1})
        judge.check(await fleet.generate(request()), PROMPT)
        judge.close()
        files = Filesystem(tmp_path / "other")  # a run has one publisher in a directory
        other = genapi.WeightPublisher(fleet, transport=files, timeouts=LIMITS)
        await leads_back(other, fleet, models, oracle)


DYING = """
import sys
import anyio
import genapi
from tests.engines.kit.meddling import meddling

async def main(target, model, folder, load):
    told = lambda call: call.path == load and print("under way", flush=True)
    async with genapi.connect(target, run="dying", transport=meddling(told=told)) as fleet:
        await fleet.wait_ready(timeout_s=60)
        transport = genapi.weights.Filesystem(folder)
        async with genapi.WeightPublisher(fleet, transport=transport) as p:
            await p.publish(1, genapi.weights.from_safetensors(model))
    print("published", flush=True)

anyio.run(main, *sys.argv[1:])
"""


def die_in_mid_load(*arguments: str) -> None:
    """Publish from a process of its own, and kill it while workers load."""
    with subprocess.Popen(
        [sys.executable, "-c", DYING, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as trainer:
        assert trainer.stdout is not None
        line = trainer.stdout.readline()
        trainer.kill()
    assert line == "under way\n"


@engine
@pytest.mark.long
async def test_a_trainer_killed_while_workers_load_leaves_what_the_next_one_heals(
    name: str, pair: Sequence[Server], models: Models, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    where = (target(*pair), str(models.seed1), str(tmp_path / "w"), LOAD[name])
    await anyio.to_thread.run_sync(die_in_mid_load, *where)
    assert [path.name for path in (tmp_path / "w").glob("[!.]*")] == ["dying-1-1"]
    async with genapi.connect(target(*pair), run="dying") as fleet:
        await fleet.wait_ready(timeout_s=60)
        assert [w.paused for w in (await fleet.snapshot()).workers] == [True, True]
        judge = Judge(oracle, {2: models.seed1, 3: models.seed0})
        transport = Filesystem(tmp_path / "w")
        async with genapi.WeightPublisher(fleet, transport=transport, timeouts=LIMITS) as p:
            for step, folder in ((2, models.seed1), (3, models.seed0)):
                report = await p.publish(step, weights(folder))
                assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 2
                for reply in await everywhere(fleet):
                    judge.check(reply, PROMPT)
        judge.close()
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["dying-3-1"]


OF_VLLM = {REJECTED.row, NOT_HEALED.row, REFUSED.row}
TABLES: dict[str, tuple[tuple[Row, ...], set[Seen]]] = {
    "vllm": (vllm_files.ROWS, OF_VLLM),
    "sglang": (sglang_files.ROWS, set()),
    "dynamo": (dynamo_files.ROWS, OF_VLLM),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_files_that_was_run_is_reached_on_a_real_engine(name: str) -> None:
    rows, elsewhere = TABLES[name]
    ways = [*(case.way for case in cases(name).values()), *ruins(name).values()]
    every_publication = Seen(Op.PROBE, Observed.DONE, Reached.HELD)
    assert_reached(rows, {way.row for way in ways} | elsewhere | {every_publication})
