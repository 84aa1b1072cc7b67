"""Publications through files to real vLLM and SGLang: exact weights, and what a failed load leaves.

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
from collections.abc import Callable, Iterator, Sequence
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
from genapi.providers.sglang import files as sglang_files
from genapi.providers.vllm import files as vllm_files
from genapi.publication.evidence import Observed, Op, Reached, Row, Seen
from genapi.publication.table import Phase
from genapi.testing.contract.meddling import Trouble
from genapi.types.worker import Evidence, FenceStrength, Recovery
from genapi.weights import Filesystem
from tests.engines import test_rows, test_sglang
from tests.engines.conftest import environment
from tests.engines.kit.judge import Judge
from tests.engines.kit.rows import assert_reached
from tests.engines.kit.server import VLLM, Engine, Server, serving
from tests.engines.kit.sglang.engine import SGLANG
from tests.engines.test_rows import ANY, BAD, FUSED, Publication, Way, leads_back, publishing
from tests.engines.test_vllm import LIMITS, PROMPT, everywhere, failed, request, target, weights

if TYPE_CHECKING:
    from tests.engines.conftest import Models, Oracle

on_engine = (pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.anyio)

NAMES = ("vllm", "sglang")
LOAD = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
RESUME = {"vllm": test_rows.RESUME, "sglang": test_sglang.RESUME}
RELABEL = {"vllm": test_rows.relabel, "sglang": test_sglang.relabel}
FEW = 8
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
            async with fleet.stream(request(tokens=1500)) as events:
                await anext(events)
                pauses = []
                for step, folder in ((1, models.seed1), (2, models.seed0)):
                    report = await p.publish(step, weights(folder))
                    assert [r.outcome for r in report.receipts] == [Outcome.COMMITTED] * 2
                    assert [r.evidence for r in report.receipts] == [Evidence.OWN_LABEL] * 2
                    pauses += [r.paused_s for r in report.receipts]
                    snapshot = await fleet.snapshot()
                    assert {w.label for w in snapshot.workers} == {report.version.label}
                    for reply in await everywhere(fleet):
                        assert reply.output.policy.oldest == report.version
                        assert reply.output.policy.is_pure
                        judge.check(reply, PROMPT)
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
            print(f"\npaused_s per worker: {[round(s, 3) for s in pauses]}")
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
    two = replace(SGLANG, variables=lambda a, b: {**SGLANG.variables(a, b), **binds})
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
            (version,) = folder.iterdir()
            file = sorted(version.glob("*.safetensors"))[place]
            file.write_bytes(file.read_bytes()[:-1000])

        return replace(self.way, at=Phase.BEGIN, hook=cut)


def elsewhere(body: dict[str, Any]) -> dict[str, Any]:
    """The load of a directory that is not there."""
    if "kwargs" in body:
        return body | {"kwargs": body["kwargs"] | {"weights_path": "/nowhere/at/all"}}
    return body | {"model_path": "/nowhere/at/all"}


def cases(name: str) -> dict[str, Case]:
    return cases_of(LOAD[name], RESUME[name], RELABEL[name], outlives_cuts=name == "vllm")


def cases_of(
    load: str, resume: str, relabel: Callable[[Server], None], *, outlives_cuts: bool
) -> dict[str, Case]:
    """What goes wrong with a server and can be healed.

    Args:
        load: the call by which it is told to load.
        resume: the one by which it is resumed.
        relabel: labels it as somebody else would.
        outlives_cuts: whether it lives on with a file that is cut short.
    """
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
                (Trouble(resume, "error", status=503),),
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
    if outlives_cuts:
        found["a first file that is cut short"] = Case(Way(unreadable), cut=0)
        found["a last file that is cut short"] = Case(Way(unreadable), cut=-1)
    return found


CASES = [(name, case) for name in NAMES for case in cases(name)]


def kill(server: Server) -> None:
    os.killpg(server.pid, signal.SIGKILL)


def ruins(name: str) -> dict[str, Way]:
    return ruins_of(LOAD[name])


def ruins_of(load: str) -> dict[str, Way]:
    """What kills a server that is told to load by this call."""
    return {
        "killed before it was asked to begin": Way(
            Seen(None, Observed.DEAD, Reached.NOT_BEGUN),
            at=Phase.CONFIRM,
            hook=kill,
            error="confirm: ",
        ),
        "killed before the load": Way(
            Seen(None, Observed.DEAD, Reached.SENT), at=(load, 1), hook=kill, error="update: "
        ),
    }


RUINS = [(name, ruin) for name in NAMES for ruin in ruins(name)]
REJECTED = Way(Seen(Op.UPDATE, Observed.REJECTED, Reached.SENT))
NOT_HEALED = Way(Seen(Op.HEAL, Observed.REJECTED, Reached.NOT_BEGUN))
REFUSED = Way(Seen(Op.HEAL, Observed.REFUSED, Reached.NOT_BEGUN))


@pytest.fixture(scope="module")
def alone(
    models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Server]]:
    """One server of an engine for all ways that lead back."""
    with contextlib.ExitStack() as stack:
        started: dict[str, Server] = {}

        def get(name: str) -> Server:
            if name not in started:
                place, kind = environment(name), {"vllm": VLLM, "sglang": SGLANG}[name]
                folder = tmp_path_factory.mktemp(name)
                servers = serving(place, models.seed0, folder=folder, engine=kind)
                (started[name],) = stack.enter_context(servers)
            return started[name]

        yield get


@contextlib.contextmanager
def own(kind: Engine, models: Models, folder: pathlib.Path) -> Iterator[Server]:
    """A server that a test may ruin."""
    place = environment(kind.scheme)
    with serving(place, models.seed0, folder=folder / "log", engine=kind) as (server,):
        yield server


Opened = contextlib.AbstractAsyncContextManager[
    tuple[Publication, genapi.WeightPublisher, genapi.Fleet]
]


async def fails_and_comes_back(
    opened: Opened,
    relabel: Callable[[], None],
    models: Models,
    oracle: Oracle,
    *,
    source: str = "engine",
) -> None:
    """A publication comes to its row, and the way back that the row names leads back."""
    async with opened as (publication, p, fleet):
        receipt = await publication.run(p, weights(models.seed1))
        publication.operations.clear()
        if receipt.recovery is Recovery.REPUBLISH:
            relabel()
        await leads_back(p, fleet, models, oracle, source=source)
        heals = receipt.recovery is Recovery.CLOSE_THEN_REPUBLISH
        assert (Op.HEAL in publication.operations) == heals


@engine
@pytest.mark.long
@pytest.mark.parametrize(("name", "what"), CASES)
async def test_a_row_says_what_is_true_of_a_load_and_its_way_back_leads_back(  # noqa: PLR0917 - pytest
    name: str,
    what: str,
    alone: Callable[[str], Server],
    models: Models,
    oracle: Oracle,
    tmp_path: pathlib.Path,
) -> None:
    server, files = alone(name), Filesystem(tmp_path, shard_bytes=SHARD)
    opened = publishing(cases(name)[what].way_in(tmp_path), server, what, files=files)
    await fails_and_comes_back(opened, partial(RELABEL[name], server), models, oracle)


@engine
@pytest.mark.long
@pytest.mark.parametrize(("name", "what"), RUINS)
async def test_a_server_that_is_gone_in_a_load_is_dead_and_has_to_be_restarted(
    name: str, what: str, models: Models, tmp_path: pathlib.Path
) -> None:
    with own({"vllm": VLLM, "sglang": SGLANG}[name], models, tmp_path) as server:
        files = Filesystem(tmp_path / "w")
        async with publishing(ruins(name)[what], server, what, files=files) as (publication, p, _):
            receipt = await publication.run(p, weights(models.seed1))
            assert receipt.fence is not None
            assert receipt.fence.strength is FenceStrength.DEAD


@engine
@pytest.mark.long
async def test_a_tensor_of_another_shape_is_rejected_by_vllm_and_healed_by_nothing(
    models: Models, tmp_path: pathlib.Path
) -> None:
    tensors = load_file(models.seed1 / "model.safetensors")
    bad = genapi.weights.from_tensors(tensors | {FUSED: BAD})
    files = Filesystem(tmp_path / "w")
    with own(VLLM, models, tmp_path) as server:
        async with publishing(REJECTED, server, "rejected", files=files) as (publication, p, _):
            await publication.run(p, bad)
        # A process that does not know what happened tries to heal it, and learns of it.
        async with publishing(NOT_HEALED, server, "healing", files=files) as (publication, p, _):
            await publication.run(p, weights(models.seed1))


@engine
@pytest.mark.long
async def test_vllm_without_weight_transfer_loads_files_exactly_but_cannot_be_healed(
    models: Models, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    flags = tuple(flag for flag in VLLM.flags if "weight-transfer" not in flag)
    lost = Way(
        Seen(Op.UPDATE, Observed.LOST, Reached.SENT),
        (Trouble(LOAD["vllm"], "lose_reply"),),
    )
    files = Filesystem(tmp_path / "w")
    with own(replace(VLLM, flags=flags), models, tmp_path) as server:
        async with publishing(ANY, server, "plain", files=files) as (_, p, fleet):
            await leads_back(p, fleet, models, oracle)
        async with publishing(lost, server, "lost", files=files) as (publication, p, _):
            await publication.run(p, weights(models.seed1))
        async with publishing(REFUSED, server, "refused", files=files) as (publication, p, _):
            receipt = await publication.run(p, weights(models.seed1))
            assert "--weight-transfer-config" in (receipt.error or "")


@engine
@pytest.mark.long
async def test_a_file_that_cannot_be_read_takes_sglang_down_and_nobody_calls_it_healthy(
    models: Models, tmp_path: pathlib.Path
) -> None:
    with own(SGLANG, models, tmp_path) as server:
        way = Way(
            ANY.row,
            at=Phase.BEGIN,
            hook=lambda _: os.truncate(tmp_path / "w" / "cut-1-1" / "model.safetensors", 100),
        )
        files = Filesystem(tmp_path / "w")
        async with publishing(way, server, "cut", files=files) as (_, p, _):
            report = await failed(p, 1, weights(models.seed1))
            (receipt,) = report.receipts
            assert receipt.outcome is Outcome.UNKNOWN
            assert receipt.fence is not None
        await anyio.to_thread.run_sync(server.process.wait, 120)


@engine
@pytest.mark.long
async def test_a_name_that_sglang_does_not_know_is_ignored_in_files_as_well(
    alone: Callable[[str], Server], models: Models, oracle: Oracle, tmp_path: pathlib.Path
) -> None:
    server = alone("sglang")
    tensors = load_file(models.seed1 / "model.safetensors")
    more = genapi.weights.from_tensors(tensors | {"model.other.weight": torch.zeros(2)})
    async with publishing(ANY, server, "unknown", files=Filesystem(tmp_path)) as (_, p, fleet):
        assert (await p.publish(1, more)).committed
        judge = Judge(oracle, {1: models.seed1})
        judge.check(await fleet.generate(request()), PROMPT)
        judge.close()
        other = genapi.WeightPublisher(fleet, transport=Filesystem(tmp_path), timeouts=LIMITS)
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
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["dying-1-1"]
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


ELSEWHERE = {
    Seen(Op.PROBE, Observed.DONE, Reached.HELD),  # every publication
}
REACHED = {
    "vllm": {REJECTED.row, NOT_HEALED.row, REFUSED.row},
    "sglang": set[Seen](),
}


@pytest.mark.parametrize(
    ("name", "rows"), [("vllm", vllm_files.ROWS), ("sglang", sglang_files.ROWS)]
)
def test_every_row_of_files_that_was_run_is_reached_on_a_real_engine(
    name: str, rows: Sequence[Row]
) -> None:
    ways = [*(case.way for case in cases(name).values()), *ruins(name).values()]
    reached = {way.row for way in ways} | REACHED[name] | ELSEWHERE
    assert_reached(rows, reached)
