"""What weight spans of an engine say about tokens."""

import pytest

from genapi import PolicyTrace, PolicyVersion, ReplyError
from genapi.providers.shapes.spans import WireSpan, trace

V7, V8 = PolicyVersion(run="r", step=7), PolicyVersion(run="r", step=8)


def spans(*wire: tuple[int, int, object], tokens: int) -> PolicyTrace:
    return trace([WireSpan(s, e, v) for s, e, v in wire], tokens=tokens, run="r")


@pytest.mark.case("VER-02")
def test_two_versions_in_one_output_are_told_apart_at_the_token() -> None:
    policy = spans((0, 57, V7.label), (57, 128, V8.label), tokens=128)
    assert (policy.oldest, policy.newest) == (V7, V8)
    assert policy.at(56).lo == V7
    assert policy.at(57).lo == V8
    assert policy.source == "engine"
    assert policy.is_mixed


@pytest.mark.case("VER-02")
@pytest.mark.parametrize(
    "wire",
    [
        [(0, 50, "genapi:r:7:1"), (57, 128, "genapi:r:8:1")],
        [(0, 60, "genapi:r:7:1"), (57, 128, "genapi:r:8:1")],
        [(0, 57, "genapi:r:7:1"), (57, 120, "genapi:r:8:1")],
        [(1, 128, "genapi:r:7:1")],
        [(0, 57, "genapi:r:7:1"), (57, 40, "genapi:r:8:1"), (40, 128, "genapi:r:8:1")],
        [],
    ],
    ids=["gap", "overlap", "short end", "late start", "backwards", "none at all"],
)
def test_spans_that_do_not_cover_every_token_once_break_the_contract(
    wire: list[tuple[int, int, object]],
) -> None:
    with pytest.raises(ReplyError, match="weight_versions"):
        spans(*wire, tokens=128)


def test_a_span_without_tokens_is_dropped() -> None:
    assert len(spans((0, 0, V7.label), (0, 2, V8.label), (2, 2, V7.label), tokens=2).spans) == 1


def test_no_spans_and_no_tokens_is_an_empty_attested_trace() -> None:
    policy = spans(tokens=0)
    assert policy.spans == ()
    assert policy.source == "engine"


def test_a_reply_without_the_field_attests_nothing() -> None:
    policy = trace(None, tokens=3, run="r")
    assert policy == PolicyTrace.unknown(3)
    assert policy.source == "inferred"


@pytest.mark.case("VER-04")
@pytest.mark.parametrize(
    "label",
    [
        "default",
        "initial",
        "unknown",
        None,
        7,
        "/models/step-7",
        "genapi:other:7:1",
        "genapi:r:7:1!updating",
    ],
)
def test_a_label_that_is_no_version_of_this_run_is_unknown(label: object) -> None:
    policy = spans((0, 3, label), tokens=3)
    assert policy.oldest is None
    assert policy.lag(7) is None
    assert not policy.is_pure


def test_an_engine_attests_versions_and_never_contexts() -> None:
    policy = spans((0, 4, V7.label), tokens=4)
    assert policy.at(0).context is None
    assert not policy.is_pure
