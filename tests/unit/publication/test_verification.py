"""Comparing what workers hold: majorities, the trainer's word, and what proves nothing."""

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genapi import ConfigError
from genapi.providers.vllm.verdicts import VERDICTS
from genapi.publication.evidence import Answer, Observed, Op
from genapi.publication.table import Phase
from genapi.publication.transaction import (
    ActDone,
    Acted,
    Answered,
    Ask,
    Progress,
    Transaction,
    advance,
    begin,
    conclude,
    fence,
)
from genapi.publication.verification import (
    Checks,
    Found,
    compare,
    compare_checksums,
    compare_scores,
    found_of,
    levels_of,
)
from genapi.types.ids import WorkerId
from genapi.types.worker import Evidence, FenceStrength, Outcome

PROBE = Checks(("label", "probe"))


def out(scores: Sequence[Sequence[float]], checks: Checks = PROBE) -> list[int]:
    """Who cannot be trusted."""
    found = compare_scores(dict(enumerate(scores)), checks)
    return [number for number, compared in found.items() if compared.fault is not None]


def test_levels_come_in_their_order_and_the_label_is_among_them() -> None:
    assert levels_of(()) == ("label",)
    assert levels_of(["probe", "checksum"]) == ("label", "checksum", "probe")
    assert levels_of("probe") == ("label", "probe")
    with pytest.raises(ConfigError, match="'hash' is none of label, checksum, probe"):
        levels_of(["hash"])


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([], []),
        ([[-1.0, -2.0]], []),
        ([[-1.0, -2.0]] * 3, []),
        ([[-1.0], [-1.0005], [-1.001]], []),
        ([[-1.0], [-1.0], [-1.1]], [2]),
        ([[-1.0], [-2.0]], [0, 1]),
        ([[-1.0], [-1.0], [-2.0], [-2.0]], [0, 1, 2, 3]),
        ([[-1.0], [-1.0], [math.nan]], [2]),
        ([[-1.0], [math.nan]], [1]),
        ([[-math.inf], [-math.inf]], [0, 1]),
    ],
)
def test_whoever_is_outside_the_majority_cannot_be_trusted(
    scores: list[list[float]], expected: list[int]
) -> None:
    assert out(scores) == expected


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([[-1.0], [-1.0]], []),
        ([[-1.0], [-2.0]], [1]),
        ([[-2.0], [-2.0], [-1.0]], [0, 1]),
        ([[-2.0], [-2.0]], [0, 1]),
        # Both near enough to the trainer, but not to each other: the nearer one is believed.
        ([[-1.05], [-1.01]], [0]),
        ([[-1.05], [-1.0]], [0]),
        ([[-1.05], [-1.05], [-1.01]], [2]),
    ],
)
def test_the_trainers_numbers_have_the_last_word(
    scores: list[list[float]], expected: list[int]
) -> None:
    assert out(scores, Checks(("label", "probe"), trainer=(-1.0,))) == expected


def test_the_gap_is_the_largest_difference_from_the_trainers_numbers() -> None:
    checks = Checks(trainer=(-1.0, -2.0), max_gap=5.0)
    found = compare_scores({"w": (-1.25, -1.5)}, checks)
    assert found["w"].gap == 0.5
    assert found["w"].fault is None


def test_scores_that_are_no_numbers_have_a_gap_all_the_same() -> None:
    found = compare_scores({"w": (-math.inf,)}, Checks(trainer=(-1.0,)))
    assert found["w"].gap == math.inf
    assert found["w"].fault == "its scores are not numbers"


def test_what_is_just_as_far_as_allowed_is_believed() -> None:
    assert out([[-1.0], [-1.5]], Checks(tolerance=0.5)) == []
    assert out([[-1.5]], Checks(trainer=(-1.0,), max_gap=0.5)) == []


ALLOWED = "at most 0.001 are allowed"


@pytest.mark.parametrize(
    ("scores", "trainer", "faults"),
    [
        ([[math.nan], [-1.0]], None, ["its scores are not numbers", None]),
        ([[-1.0], [-3.0]], None, ["workers disagree by up to 2 nats, and no majority agrees"] * 2),
        (
            [[-1.0], [-1.0], [-1.25]],
            None,
            [
                None,
                None,
                f"its scores are up to 0.25 nats from those of most workers, {ALLOWED}",
            ],
        ),
        (
            [[-1.0], [-1.5]],
            (-1.0,),
            [
                None,
                "its scores are up to 0.5 nats from the trainer's, at most 0.1 are allowed",
            ],
        ),
    ],
)
def test_why_scores_cannot_be_trusted_is_told_in_nats(
    scores: list[list[float]], trainer: tuple[float, ...] | None, faults: list[str | None]
) -> None:
    found = compare_scores(dict(enumerate(scores)), Checks(trainer=trainer))
    assert [found[number].fault for number in range(len(scores))] == faults


def test_workers_that_were_asked_for_no_scores_agree() -> None:
    found = compare_scores({"a": [], "b": []}, Checks(trainer=()))
    assert [(c.peers, c.gap, c.fault) for c in found.values()] == [(1, 0.0, None)] * 2


def test_scores_of_other_ids_than_the_trainers_are_not_compared() -> None:
    with pytest.raises(ValueError, match="is longer than"):
        compare_scores({"a": [-1.0]}, Checks(trainer=(-1.0, -2.0)))


def test_every_worker_is_told_its_peers_and_its_gap() -> None:
    scores = {"a": [-1.0], "b": [-1.0], "far": [-1.0625], "out": [-2.0]}
    found = compare_scores(scores, Checks(trainer=(-1.0,)))
    assert {k: (c.peers, c.gap) for k, c in found.items()} == {
        "a": (1, 0.0),
        "b": (1, 0.0),
        "far": (0, 0.0625),
        "out": (0, 1.0),
    }


@given(
    true=st.lists(st.floats(-20, 0), min_size=1, max_size=4),
    good=st.integers(1, 6),
    bad=st.integers(0, 5),
)
def test_a_majority_that_agrees_is_always_believed(true: list[float], good: int, bad: int) -> None:
    wrong = [value - 1 - i for i, value in enumerate(true)]
    scores = [true] * good + [wrong] * min(bad, good - 1)
    assert out(scores) == list(range(good, len(scores)))


def test_bytes_are_compared_within_a_topology_only() -> None:
    a, b = {"x": "1", "y": "2"}, {"x": "1", "y": "3"}
    found = compare_checksums({1: ("tp1", a), 2: ("tp1", a), 3: ("tp1", b), 4: ("tp2", b)})
    assert [number for number, compared in found.items() if compared.fault] == [3]
    assert "in y" in (found[3].fault or "")
    assert [compared.peers for compared in found.values()] == [1, 1, 0, 0]


def test_of_two_whose_bytes_differ_nobody_is_believed() -> None:
    found = compare_checksums({1: ("t", {"x": "1"}), 2: ("t", {"x": "2"})})
    fault = "workers hold different bytes, and no majority agrees"
    assert [compared.fault for compared in found.values()] == [fault, fault]


def test_a_parameter_that_one_lacks_is_a_difference() -> None:
    whole = {"x": "1", "y": "2"}
    found = compare_checksums({1: ("t", whole), 2: ("t", whole), 3: ("t", {"x": "1"})})
    assert found[3].fault is not None


@pytest.mark.parametrize(("lost", "told"), [(3, "p0, p1, p2"), (5, "p0, p1, p2 and 2 more")])
def test_the_first_parameters_that_differ_are_named_and_the_others_counted(
    lost: int, told: str
) -> None:
    whole = {f"p{i}": "1" for i in range(6)}
    other = {**whole, **{f"p{i}": "2" for i in range(lost)}}
    found = compare_checksums({1: ("t", whole), 2: ("t", whole), 3: ("t", other)})
    assert found[3].fault == f"it holds other bytes than most workers in {told}"


def test_facts_of_a_worker_show_what_the_comparison_found() -> None:
    right = Answer(Observed.DONE, facts={"scores": (-1.0,), "label": "l"})
    wrong = Answer(Observed.DONE, facts={"scores": (-1.5,)})
    silent = Answer(Observed.LOST, facts={"scores": (-1.0,)})
    blank = Answer(Observed.DONE)
    answers = {"a": right, "b": right, "c": wrong, "d": silent, "e": blank}
    compared = compare(Op.PROBE, answers, Checks(trainer=(-1.0,)))
    assert set(compared) == {"a", "b", "c"}
    assert compared["a"] == Answer(
        Observed.DONE, facts={"scores": (-1.0,), "label": "l", "peers": 1, "gap": 0.0}
    )
    assert compared["c"] == Answer(
        Observed.DIFFERS,
        "its scores are up to 0.5 nats from the trainer's, at most 0.1 are allowed",
        {"scores": (-1.5,), "peers": 0, "gap": 0.5},
    )


def test_workers_that_name_no_topology_are_compared_with_each_other() -> None:
    answers = {
        key: Answer(Observed.DONE, facts={"checksums": {"x": digest}, **topology})
        for key, digest, topology in (
            ("a", "1", {}),
            ("b", "1", {"topology": 7}),
            ("c", "2", {"topology": "tp2"}),
        )
    }
    compared = compare(Op.READ, answers, Checks())
    assert {key: answer.facts["peers"] for key, answer in compared.items()} == {
        "a": 1,
        "b": 1,
        "c": 0,
    }
    assert all(answer.done for answer in compared.values())


@pytest.mark.parametrize("op", sorted(set(Op) - {Op.READ, Op.PROBE}))
def test_nothing_else_that_is_asked_is_compared(op: Op) -> None:
    answers = {key: Answer(Observed.DONE, facts={"scores": (s,)}) for key, s in (("a", -1.0),)}
    assert compare(op, answers, PROBE) == {}


def test_what_a_checksum_did_not_see_and_how_far_the_trainer_is_are_found() -> None:
    answers = {
        Op.READ: Answer(Observed.DONE, facts={"label": "l", "peers": 2, "blind": 4}),
        Op.PROBE: Answer(Observed.DONE, facts={"peers": 0, "gap": 0.25}),
    }
    checks = Checks(("label", "checksum", "probe"))
    assert found_of("l", answers, checks) == Found(("label", "checksum", "probe"), 4, 0.25)
    lost = {Op.READ: Answer(Observed.LOST, facts={"peers": 2}), Op.PROBE: answers[Op.PROBE]}
    assert found_of("l", lost, checks) == Found(("probe",), None, 0.25)
    odd = {Op.READ: Answer(Observed.DONE, facts={"label": "l", "blind": "many"})}
    assert found_of("l", odd, checks) == Found(("label",), None, None)
    differs = {Op.PROBE: Answer(Observed.DIFFERS, facts={"peers": 1, "gap": 0.25})}
    assert found_of("l", differs, checks) == Found((), None, 0.25)


LABEL = "genapi:r:3:1"
A, B, C = (WorkerId(provider="vllm", instance=name) for name in "abc")


def published(facts: Mapping[WorkerId, Mapping[Op, object]], checks: Checks) -> Transaction:
    """A publication in which every call succeeds and workers show these facts."""
    workers = {worker: Progress() for worker in facts}
    tx, commands = begin(Transaction(label=LABEL, workers=workers, checks=checks))
    todo = list(commands)
    while todo:
        match todo.pop(0):
            case Ask(worker, op):
                names = {Op.READ: "checksums", Op.PROBE: "scores"}
                seen: dict[str, object] = {"label": LABEL}
                if op in names and op in facts[worker]:
                    seen[names[op]] = facts[worker][op]
                answer = Answer(Observed.DONE, facts=seen)
                tx, more = advance(tx, Answered(worker, op, answer))
            case Acted(act):
                tx, more = advance(tx, ActDone(act))
            case other:
                raise AssertionError(other)
        todo.extend(more)
    return tx


def test_whoever_does_not_pass_the_probe_is_shut_and_nobody_else() -> None:
    right, wrong = {Op.PROBE: (-1.0,)}, {Op.PROBE: (-3.0,)}
    tx = published({A: right, B: wrong, C: right}, PROBE)
    assert (tx.phase, tx.committed, tx.failed) == (Phase.DONE, True, True)
    assert [Op.SHUT in p.asked for p in tx.workers.values()] == [False, True, False]
    verdicts = [conclude(tx, p, VERDICTS) for p in tx.workers.values()]
    assert [v.outcome for v in verdicts] == [
        Outcome.COMMITTED,
        Outcome.DIRTY,
        Outcome.COMMITTED,
    ]
    assert verdicts[1].evidence is Evidence.OTHER_SCORES
    fences = [fence(tx, p, v) for p, v in zip(tx.workers.values(), verdicts, strict=True)]
    assert [f and f.strength for f in fences] == [None, FenceStrength.PAUSED, None]
    levels = [found_of(LABEL, p.answers, PROBE).levels for p in tx.workers.values()]
    assert levels == [("label", "probe"), ("label",), ("label", "probe")]


def test_whoever_holds_other_bytes_stops_the_publication_before_it_counts() -> None:
    checks = Checks(("label", "checksum"))
    right, wrong = {Op.READ: {"x": "1"}}, {Op.READ: {"x": "2"}}
    tx = published({A: right, B: right, C: wrong}, checks)
    assert (tx.phase, tx.committed) == (Phase.HELD, False)
    assert all(Op.RESUME not in p.asked for p in tx.workers.values())
    outcomes = [conclude(tx, p, VERDICTS).outcome for p in tx.workers.values()]
    assert outcomes == [Outcome.COMMITTED, Outcome.COMMITTED, Outcome.DIRTY]
    levels = [found_of(LABEL, p.answers, checks).levels for p in tx.workers.values()]
    assert levels == [("label", "checksum"), ("label", "checksum"), ("label",)]


def test_without_levels_nothing_is_compared_and_nobody_is_shut() -> None:
    tx = published({A: {}, B: {}}, Checks())
    assert (tx.phase, tx.failed) == (Phase.DONE, False)
    assert all(Op.SHUT not in p.asked for p in tx.workers.values())


def test_a_comparison_with_nobody_proves_nothing() -> None:
    checks = Checks(("label", "checksum", "probe"))
    tx = published({A: {Op.READ: {"x": "1"}, Op.PROBE: (-1.0,)}}, checks)
    found = found_of(LABEL, tx.workers[A].answers, checks)
    assert (tx.committed, tx.failed) == (True, False)
    assert (found.levels, found.gap) == (("label",), None)
