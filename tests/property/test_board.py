"""The board's JSON, and leases of two publishers on one board where replies get lost."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from genapi.board import Lease, MemoryBoard, Reading, Token, take_epoch
from genapi.errors import ReplyError, SupersededError, TransportError
from genapi.types.board import BoardState, BoardWorker, decode_board, encode_board
from genapi.types.policy import PolicyVersion
from genapi.types.worker import Fence, FenceStrength, Recovery

T = TypeVar("T")

RUNS = st.from_regex(r"[A-Za-z0-9._-]{1,8}", fullmatch=True)
TEXT = st.text(min_size=1, max_size=20)
FENCES = st.builds(
    Fence,
    strength=st.sampled_from(FenceStrength),
    reason=st.text(max_size=20),
    recovery=st.sampled_from(Recovery),
)
WORKERS = st.lists(
    st.builds(BoardWorker, id=TEXT, fence=st.none() | FENCES),
    max_size=4,
    unique_by=lambda worker: worker.id,
)


def versions(run: st.SearchStrategy[str]) -> st.SearchStrategy[PolicyVersion]:
    return st.builds(PolicyVersion, run=run, step=st.integers(0, 10**6), attempt=st.integers(1, 99))


@st.composite
def states(draw: st.DrawFn) -> BoardState:
    run = draw(st.none() | RUNS)
    target = draw(st.none() | versions(RUNS))
    committed = None if run is None else draw(st.none() | versions(st.just(run)))
    return BoardState(
        run=run,
        epoch=draw(st.integers(0, 2**53)),
        phase="idle" if target is None else draw(st.sampled_from(["publishing", "held"])),
        committed=committed,
        final=committed is not None and target is None and draw(st.booleans()),
        target=target,
        workers=tuple(draw(WORKERS)),
        holder=draw(TEXT),
        since=draw(st.floats(0, 1e12)),
    )


@given(states())
def test_every_state_is_read_back_from_its_json(state: BoardState) -> None:
    line = encode_board(state)
    assert decode_board(line) == state
    assert b"\n" not in line


@given(states(), st.from_regex(r"new_\w{1,8}", fullmatch=True), st.integers() | st.text())
def test_fields_that_only_a_newer_genapi_writes_are_left_out(
    state: BoardState, name: str, value: int | str
) -> None:
    raw = json.loads(encode_board(state))
    raw[name] = value
    for worker in raw["workers"]:
        if isinstance(worker, dict):
            worker[name] = value
            worker["fence"][name] = value
    assert decode_board(json.dumps(raw).encode()) == state


@given(states(), st.data())
def test_a_state_that_is_cut_off_or_lacks_a_field_is_an_error(
    state: BoardState, data: st.DataObject
) -> None:
    line = encode_board(state)
    with pytest.raises(ReplyError, match="somewhere"):
        decode_board(line[: data.draw(st.integers(0, len(line) - 1))], source="somewhere")
    raw = json.loads(line)
    del raw[data.draw(st.sampled_from(sorted(raw)))]
    with pytest.raises(ReplyError, match="somewhere"):
        decode_board(json.dumps(raw).encode(), source="somewhere")


@given(states(), st.data())
def test_a_field_of_another_kind_is_an_error_and_nothing_else(
    state: BoardState, data: st.DataObject
) -> None:
    raw = json.loads(encode_board(state))
    name = data.draw(st.sampled_from(sorted(raw)))
    value = data.draw(st.sampled_from([True, -1, 1.5, "", "two words", [1], [{}], {"a": 1}]))
    raw[name] = value
    try:
        decode_board(json.dumps(raw).encode())
    except ReplyError:
        return
    assert (name, value) in (("holder", "two words"), ("since", 1.5))


def test_a_board_of_hundreds_of_workers_stays_small() -> None:
    workers = tuple(
        BoardWorker(id=f"vllm/http://10.0.{n // 250}.{n % 250}:8000/{n:032x}") for n in range(400)
    )
    state = BoardState(run="r", epoch=1, workers=workers, holder="host/1/abc")
    assert len(encode_board(state)) < 400 * 75


# ---------------------------------------------------------------------------------- leases

Fault = Literal["none", "not_sent", "lost_request", "lost_reply", "late"]
FAULTS = st.sampled_from(["none", "none", "not_sent", "lost_request", "lost_reply", "late"])
NAMES = st.sampled_from(["one", "two"])


class FaultyBoard:
    """A board whose next write is lost, late, or preceded by somebody else's."""

    def __init__(self) -> None:
        self.board = MemoryBoard()
        self.fault: Fault = "none"
        self.rival: Callable[[], Awaitable[object]] | None = None
        self.late: list[tuple[Token, BoardState]] = []

    async def read(self) -> Reading:
        return await self.board.read()

    async def compare_and_set(self, token: Token, new: BoardState) -> Token | None:
        fault, self.fault = self.fault, "none"
        rival, self.rival = self.rival, None
        if rival is not None:
            await rival()
        match fault:
            case "not_sent":
                raise TransportError("not sent", phase="not_sent")
            case "lost_request" | "late":
                if fault == "late":
                    self.late.append((token, new))
                raise TransportError("lost", phase="may_have_run")
            case "lost_reply":
                await self.board.compare_and_set(token, new)
                raise TransportError("lost", phase="may_have_run")
            case "none":
                return await self.board.compare_and_set(token, new)

    async def aclose(self) -> None:
        await self.board.aclose()


class Publishers(RuleBasedStateMachine):
    """Two publishers that take one board from each other."""

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.Runner()
        self.board = FaultyBoard()
        self.leases: dict[str, Lease] = {}
        self.history: list[BoardState] = []

    def teardown(self) -> None:
        self.loop.close()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(call)

    @property
    def record(self) -> BoardState | None:
        return self.run(self.board.read()).state

    def outcome(self, call: Coroutine[Any, Any, T]) -> T | SupersededError | TransportError:
        try:
            return self.run(call)
        except (SupersededError, TransportError) as error:
            return error

    async def take(self, name: str, run: str | None) -> Lease:
        self.leases[name] = await take_epoch(self.board, name, run, clock=lambda: 0.0)
        return self.leases[name]

    def is_current(self, name: str) -> bool:
        record = self.record
        return record is not None and record.epoch == self.leases[name].epoch

    @rule(name=NAMES, run=st.sampled_from([None, "r", "q"]), fault=FAULTS, raced=st.booleans())
    def taking(self, name: str, run: str | None, fault: Fault, raced: bool) -> None:
        rival = "two" if name == "one" else "one"
        before = self.record
        self.board.fault = fault
        self.board.rival = (lambda: self.take(rival, None)) if raced else None
        outcome = self.outcome(self.take(name, run))
        if isinstance(outcome, Lease):
            assert outcome.state == self.record
            assert outcome.holder == name
            assert outcome.epoch > (before.epoch if before else 0)
            assert outcome.found is None or outcome.found.epoch < outcome.epoch
        else:
            assert isinstance(outcome, TransportError)
            assert outcome.phase == fault == "not_sent"

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        fault=FAULTS,
        raced=st.booleans(),
        move=st.sampled_from(["open", "commit", "hold", "drop"]),
    )
    def writing(self, data: st.DataObject, fault: Fault, raced: bool, move: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.leases)), label="who")
        rival = "two" if name == "one" else "one"
        lease, before, current = self.leases[name], self.record, self.is_current(name)
        self.board.fault = fault
        self.board.rival = (lambda: self.take(rival, None)) if raced else None
        outcome = self.outcome(self.write(lease, move))
        match outcome:
            case BoardState():
                assert current
                assert not raced
                assert outcome == lease.state == self.record
            case SupersededError():
                assert raced or not current
                record = self.record
                assert record is not None
                assert (outcome.holder, outcome.epoch) == (record.holder, record.epoch)
                assert raced or record == before
            case TransportError():
                assert outcome.phase == fault == "not_sent"

    async def write(self, lease: Lease, move: str) -> BoardState:
        state = lease.state
        run = state.run or "r"
        committed = state.committed.step if state.committed else -1
        newer = PolicyVersion(run=run, step=committed + 1)
        match move:
            case "open":
                return await lease.write(phase="publishing", target=newer)
            case "hold":
                return await lease.write(phase="held", target=newer)
            case "commit":
                return await lease.write(phase="idle", committed=newer)
            case _:
                return await lease.write(phase="idle")

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def checking(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.leases)), label="who")
        lease = self.leases[name]
        if self.is_current(name):
            assert self.run(lease.check()) == self.record
        else:
            with pytest.raises(SupersededError):
                self.run(lease.check())

    @precondition(lambda self: self.board.late)
    @rule()
    def arriving_late(self) -> None:
        token, new = self.board.late.pop(0)
        self.run(self.board.board.compare_and_set(token, new))

    @invariant()
    def epochs_only_grow_and_versions_do_not_go_back(self) -> None:
        record = self.record
        if record is None:
            return
        last = self.history[-1] if self.history else record
        self.history.append(record)
        assert record.epoch >= last.epoch
        if record.epoch == last.epoch:
            assert record.holder == last.holder
        if last.committed is not None and record.run == last.run:
            assert record.committed is not None
            assert record.committed.step >= last.committed.step

    @invariant()
    def at_most_one_holds_the_board(self) -> None:
        assert sum(map(self.is_current, self.leases)) <= 1


TestPublishers = Publishers.TestCase
