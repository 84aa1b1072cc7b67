"""What tokens may have attended to, by how their versions were published."""

import pytest

from genapi import PolicyTrace, PolicyVersion, Span
from genapi.publication.context import context_rule, with_contexts
from genapi.publication.plan import PausePlan
from genapi.types.policy import ContextRule

V6, V7, V8 = (PolicyVersion(run="r", step=step) for step in (6, 7, 8))


def trace(*versions: PolicyVersion | None) -> PolicyTrace:
    spans = (Span(start=n, end=n + 1, lo=v, hi=v) for n, v in enumerate(versions))
    return PolicyTrace(spans=tuple(spans), source="engine")


def contexts(
    *versions: PolicyVersion | None, rule: ContextRule, salted: PolicyVersion | None = None
) -> list[PolicyVersion | None]:
    rules: dict[PolicyVersion, ContextRule] = dict.fromkeys((V7, V8), rule)
    return [s.context for s in with_contexts(trace(*versions), rules, salted=salted).spans]


def test_under_the_own_rule_tokens_rest_on_their_own_version() -> None:
    assert contexts(V7, V8, rule="own") == [V7, V8]


def test_under_the_carried_rule_tokens_rest_on_the_oldest_version_so_far() -> None:
    assert contexts(V7, V8, rule="carried", salted=V7) == [V7, V7]


def test_a_request_that_waited_for_a_newer_version_may_rest_on_its_salts_version() -> None:
    assert contexts(V8, rule="carried", salted=V7) == [V7]


def test_without_a_salt_nothing_bounds_what_a_carried_cache_held() -> None:
    assert contexts(V8, rule="carried") == [None]


def test_an_unknown_span_makes_every_carried_context_after_it_unknown() -> None:
    assert contexts(None, V8, rule="carried", salted=V7) == [None, None]


def test_a_version_that_this_process_did_not_publish_has_no_known_context() -> None:
    assert contexts(V6, rule="own") == [None]


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (PausePlan("keep", "recompute", "salt"), "own"),
        (PausePlan("drain", "recompute", "flush"), "own"),
        (PausePlan("keep", "stale", "salt"), "carried"),
        (PausePlan("keep", "stale", "stale"), "unknown"),
        (PausePlan("abort", "recompute", "stale"), "unknown"),
    ],
)
def test_a_plan_guarantees_what_it_does_to_caches(plan: PausePlan, rule: ContextRule) -> None:
    assert context_rule(plan) == rule


def test_a_salt_of_another_run_bounds_nothing_of_this_one() -> None:
    other = PolicyVersion(run="other", step=1)
    assert contexts(V7, V8, rule="carried", salted=other) == [None, None]


def test_a_carried_context_is_the_oldest_also_where_versions_go_back() -> None:
    assert contexts(V8, V7, rule="carried", salted=V8) == [V8, V7]


def test_tokens_of_an_interval_have_no_known_context_and_nor_has_what_is_carried_over_them() -> (
    None
):
    spans = (Span(start=0, end=1, lo=V7, hi=V8), Span(start=1, end=2, lo=V8, hi=V8))
    inferred = PolicyTrace(spans=spans, source="engine")
    for rule, expected in (("own", [None, V8]), ("carried", [None, None])):
        rules: dict[PolicyVersion, ContextRule] = dict.fromkeys((V7, V8), rule)  # type: ignore[arg-type]
        found = with_contexts(inferred, rules, salted=V7)
        assert [span.context for span in found.spans] == expected
