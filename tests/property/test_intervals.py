"""Inferred intervals against a simulated fleet whose every token's version is known."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genapi.publication.intervals import Interval, Reading, Rounds, Sight, infer, inferred_trace
from genapi.types.ids import WorkerId
from genapi.types.policy import PolicyVersion, parse_label

RUN = "r"
FIRST = 7


def version(step: int) -> PolicyVersion:
    return PolicyVersion(run=RUN, step=step)


@dataclass
class Worker:
    """A server: its weights are `made_by`, whatever its label says."""

    name: str
    life: int = 1
    made_by: PolicyVersion | None = field(default_factory=lambda: version(FIRST))
    label: str = field(default_factory=lambda: version(FIRST).label)
    paused: bool = False

    @property
    def id(self) -> WorkerId:
        return WorkerId(provider="vllm", component=self.name, instance=str(self.life))


@dataclass
class Asked:
    """A request on its way: `before` as it was sent, and which versions made its tokens."""

    worker: Worker
    life: int
    before: dict[str, Sight | None]
    read_from: int
    made_by: list[PolicyVersion | None] = field(default_factory=list)
    read: int | None = None
    result: Interval | None = None


class World:
    """Workers, one publisher, one reader and requests; each method is one atomic happening.

    The publisher pauses all workers until every label is written, or (`rolling`) one by one.
    """

    def __init__(self, workers: int, *, routed: bool = False, rolling: bool = False) -> None:
        self.workers = [Worker(f"w{index}") for index in range(workers)]
        self.routed = routed
        self.rolling = rolling
        self.now = 0
        self.rounds = Rounds()
        self.known: dict[str, Sight | None] = {w.name: Sight(w.id, w.label) for w in self.workers}
        self.known_from: dict[str, int] = {w.name: 0 for w in self.workers}
        self.seen: dict[str, Sight | None] = {}
        self.seen_from = 0
        self.requests: list[Asked] = []
        self.publications: list[list[int]] = []
        self.script: Iterator[None] | None = None
        self.step = FIRST
        self.judged: set[tuple[int | None, int | None]] = set()

    # the fleet

    def publish(self) -> None:
        """The next moment of a publication; a new one starts where none runs."""
        if self.script is None:
            self.script = self._publication()
        if next(self.script, self) is self:
            self.script = None

    def _publication(self) -> Iterator[None]:
        self.step += 1
        target = version(self.step)
        self.publications.append([self.now])
        groups = [[w] for w in self.workers] if self.rolling else [self.workers]
        for group in groups:
            for worker in group:
                worker.paused = True
                yield
            for worker in group:
                worker.label = target.updating_label
                yield
            for worker in group:
                worker.made_by = target
                yield
                worker.label = target.label
                yield
            read_back = {w.name: (Sight(w.id, w.label), self.now) for w in group}
            for worker in group:
                worker.paused = False
                yield
            for name, (sight, at) in read_back.items():
                self.known[name], self.known_from[name] = sight, at
        self.publications[-1].append(self.now)

    def restart(self, index: int) -> None:
        worker = self.workers[index]
        worker.life += 1
        worker.made_by, worker.label, worker.paused = None, "default", False
        self.requests = [r for r in self.requests if r.worker is not worker or r.read is not None]

    # the reader

    def read(self) -> None:
        """The next moment of a read: it starts, sees one worker after another, and ends."""
        if self.rounds.is_due:
            self.rounds.start()
            self.seen, self.seen_from = {}, self.now
        elif len(self.seen) < len(self.workers):
            worker = self.workers[len(self.seen)]
            self.seen[worker.name] = Sight(worker.id, worker.label, held=self._held(worker))
        else:
            self.known = dict(self.seen)
            for name, sight in self.seen.items():
                if sight is not None and sight.version(RUN) is not None:
                    self.known_from[name] = self.seen_from
            self.rounds.end()
            self._answer()

    def _held(self, worker: Worker) -> object:
        last = self.known[worker.name]
        if last is None or last.worker != worker.id:
            return None
        return last.label if last.version(RUN) is not None else last.held

    def _answer(self) -> None:
        for request in self.requests:
            if request.read == self.rounds.ended and request.result is None:
                after = {name: self.seen[name] for name in request.before}
                request.result = infer(request.before, Reading(after), run=RUN)
                self._judge(request, request.result)

    # requests

    def ask(self, index: int) -> None:
        worker = self.workers[index]
        names = [w.name for w in self.workers] if self.routed else [worker.name]
        before = {name: self.known[name] for name in names}
        since = min(self.known_from[name] for name in names)
        self.requests.append(Asked(worker, worker.life, before, since))

    def generate(self, request: Asked) -> None:
        request.made_by.append(request.worker.made_by)

    def finish(self, request: Asked) -> None:
        request.read = self.rounds.ask()

    def moves(self) -> list[Callable[[], None]]:
        """Everything that may happen now."""
        moves: list[Callable[[], None]] = [self.publish]
        if self.rounds.is_due or self.rounds.started > self.rounds.ended:
            moves.append(self.read)
        for index in range(len(self.workers)):
            moves.append(lambda index=index: self.ask(index))  # type: ignore[misc]
            if self.script is None:
                moves.append(lambda index=index: self.restart(index))  # type: ignore[misc]
        for request in self.requests:
            if request.read is None:
                if not request.worker.paused:
                    moves.append(lambda request=request: self.generate(request))  # type: ignore[misc]
                moves.append(lambda request=request: self.finish(request))  # type: ignore[misc]
        return moves

    def happen(self, move: Callable[[], None]) -> None:
        self.now += 1
        move()

    def go_on(self, kind: int) -> bool:
        """The next moment of the publication (0), the only request (1) or a read (2), if it can."""
        request = self.requests[0] if self.requests else None
        reading = self.rounds.is_due or self.rounds.started > self.rounds.ended
        if (kind == 1 and request and not request.made_by and self.workers[0].paused) or (
            kind == 2 and not reading
        ):
            return False
        if kind != 1:
            self.happen(self.read if kind else self.publish)
        elif request is None:
            self.happen(lambda: self.ask(0))
        elif not request.made_by:
            self.happen(lambda: self.generate(request))
        else:
            self.happen(lambda: self.finish(request))
        return True

    # what has to hold

    def _judge(self, request: Asked, interval: Interval) -> None:
        lo, hi = interval
        for made_by in request.made_by:
            if lo is not None:
                assert made_by is not None
                assert lo <= made_by
            if hi is not None and made_by is not None:  # weights without a version precede all
                assert made_by <= hi
        if lo is not None and hi is not None:
            overlapping = [p for p in self.publications if len(p) == 1 or p[1] >= request.read_from]
            assert hi.step - lo.step <= len(overlapping)
        self.judged.add((lo.step if lo else None, hi.step if hi else None))


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("rolling", [False, True])
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 3), length=st.integers(50, 300))
def test_the_version_of_every_token_lies_in_its_interval(
    routed: bool, rolling: bool, seed: int, workers: int, length: int
) -> None:
    chance = random.Random(seed)  # noqa: S311 - short lists of choices would reach little
    world = World(workers, routed=routed, rolling=rolling)
    for _ in range(length):
        world.happen(chance.choice(world.moves()))


def interleavings(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every order of several sequences of these lengths, as indexes of the sequences."""
    if not any(lengths):
        yield ()
        return
    for index, length in enumerate(lengths):
        if length:
            rest = (*lengths[:index], length - 1, *lengths[index + 1 :])
            for tail in interleavings(rest):
                yield (index, *tail)


@pytest.mark.timeout(300)
def test_one_publication_beside_one_request_in_every_order() -> None:
    judged: set[tuple[int | None, int | None]] = set()
    orders = 0
    # pause, mark, load, label, resume and note; send, one token, end; two reads of one worker.
    for order in interleavings((6, 3, 6)):
        world = World(1)
        world.rounds.ask()
        if all(world.go_on(kind) for kind in order):
            orders += 1
            judged |= world.judged
    assert orders > 10_000
    assert judged == {(7, 7), (7, 8), (8, 8)}


@given(st.lists(st.sampled_from(["ask", "read"]), max_size=60))
def test_a_read_answers_exactly_those_who_asked_after_the_last_one_started(
    happenings: list[str],
) -> None:
    rounds = Rounds()
    waiting: dict[int, list[int]] = {}
    started_at: dict[int, int] = {}
    for now, what in enumerate(happenings):
        if what == "ask":
            waiting.setdefault(rounds.ask(), []).append(now)
            assert len(waiting) <= 2
        elif rounds.is_due:
            started_at[rounds.start()] = now
        elif rounds.started > rounds.ended:
            for asked in waiting.pop(rounds.started):
                assert asked < started_at[rounds.started]
                assert all(start < asked for n, start in started_at.items() if n < rounds.started)
            rounds.end()
    assert list(started_at) == list(range(1, len(started_at) + 1))
    assert all(a < b for a, b in pairwise(started_at.values()))


def test_a_read_neither_starts_nor_ends_unasked() -> None:
    rounds = Rounds()
    with pytest.raises(ValueError, match="due"):
        rounds.start()
    with pytest.raises(ValueError, match="under way"):
        rounds.end()
    rounds.ask()
    rounds.start()
    with pytest.raises(ValueError, match="due"):
        rounds.start()


ONE = WorkerId(provider="vllm", component="w0", instance="1")
TWO = WorkerId(provider="vllm", component="w1", instance="1")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("genapi:r:7:1", "genapi:r:7:1", (7, 7)),
        ("genapi:r:7:1", "genapi:r:9:1", (7, 9)),
        ("genapi:r:7:1", "default", (7, None)),
        ("genapi:r:7:1", None, (7, None)),
        # It goes on to what it is updated to.
        ("genapi:r:7:1", "genapi:r:8:1!updating", (7, 8)),
        ("genapi:r:7:1", "genapi:other:8:1!updating", (7, None)),
        ("genapi:r:7:1", "genapi:other:8:1", (7, None)),
        ("default", "genapi:r:8:1", (None, 8)),
        ("genapi:r:7:1!updating", "genapi:r:8:1", (None, 8)),
        # Labels only advance: these did not.
        ("genapi:r:8:1", "genapi:r:7:1", (None, None)),
        ("genapi:r:7:2", "genapi:r:7:1", (None, None)),
    ],
)
def test_the_labels_before_and_after_bound_what_may_have_been(
    before: str, after: object, expected: tuple[int | None, int | None]
) -> None:
    interval = infer({"w0": Sight(ONE, before)}, Reading({"w0": Sight(ONE, after)}), run=RUN)
    assert tuple(v and v.step for v in interval) == expected


def test_without_a_run_both_labels_have_to_name_the_same_one() -> None:
    def of(before: str, after: str) -> Interval:
        return infer({"w": Sight(ONE, before)}, Reading({"w": Sight(ONE, after)}), run=None)

    assert of("genapi:a:1:1", "genapi:a:2:1").lo == parse_label("genapi:a:1:1")
    assert of("genapi:a:1:1", "genapi:b:2:1") == (None, None)


def test_a_worker_that_was_not_read_or_has_another_life_leaves_nothing_known() -> None:
    known = Sight(ONE, "genapi:r:7:1")
    reborn = Sight(ONE.model_copy(update={"instance": "2"}), "genapi:r:7:1")
    for before, after in (
        ({"w": known}, {"w": reborn}),
        ({"w": known}, {"w": None}),
        ({"w": None}, {"w": known}),
        ({"w": known}, {}),
        ({"w": known}, {"w": known, "new": known}),
        ({}, {}),
    ):
        assert infer(before, Reading(after), run=RUN) == (None, None)


def test_the_label_of_a_fenced_worker_says_nothing_of_its_weights() -> None:
    known, fenced = Sight(ONE, "genapi:r:7:1"), Sight(ONE, "genapi:r:7:1", proved=False)
    assert infer({"w": fenced}, Reading({"w": known}), run=RUN) == (None, version(7))
    assert infer({"w": known}, Reading({"w": fenced}), run=RUN) == (version(7), None)


def test_a_worker_that_is_being_updated_serves_nothing_older_than_it_held_before() -> None:
    updating = Sight(ONE, "genapi:r:8:1!updating", held="genapi:r:7:1")
    later = Reading({"w": Sight(ONE, "genapi:r:8:1")})
    assert infer({"w": updating}, later, run=RUN) == (version(7), version(8))
    assert infer({"w": updating._replace(proved=False)}, later, run=RUN) == (None, version(8))
    assert infer({"w": updating._replace(label="default")}, later, run=RUN) == (None, version(8))


def test_a_record_of_versions_bounds_from_above_what_labels_leave_open() -> None:
    before = {"w0": Sight(ONE, "genapi:r:7:1"), "w1": Sight(TWO, "genapi:r:8:1")}
    after = {"w0": Sight(ONE, "default"), "w1": Sight(TWO, "genapi:r:8:1")}
    assert infer(before, Reading(after), run=RUN) == (version(7), None)
    assert infer(before, Reading(after, feed=version(9)), run=RUN) == (version(7), version(9))
    assert infer(before, Reading(after, feed=version(7)), run=RUN) == (version(7), version(8))


def test_an_output_without_tokens_has_no_spans() -> None:
    assert inferred_trace(0, Interval(version(7), version(8))).spans == ()
    assert len(inferred_trace(5, Interval(version(7), version(8)))) == 5
