"""What tokens may have attended to: follows from how each version was published.

The rule of this file: an engine attests which weights made a token, never what those weights read
from a cache. That is known only to whoever published the version, from the plan it carried out.
"""

from collections.abc import Mapping

from genapi.publication.plan import PausePlan
from genapi.types.policy import ContextRule, PolicyTrace, PolicyVersion, Span

__all__ = ("context_rule", "with_contexts")


def context_rule(plan: PausePlan) -> ContextRule:
    """What a publication with this plan guarantees about the tokens of its version."""
    if plan.prefix_cache == "stale":
        return "unknown"
    return "carried" if plan.in_flight_kv == "stale" else "own"


def with_contexts(
    trace: PolicyTrace,
    rules: Mapping[PolicyVersion, ContextRule],
    *,
    salted: PolicyVersion | None,
) -> PolicyTrace:
    """The trace with the contexts that the rules guarantee; versions without a rule get none.

    Args:
        trace: what the engine attests.
        rules: by version, from whoever published it.
        salted: the version in the request's cache salt: cached entries that it found may be that
            old. None = the request had no salt of genapi's.
    """
    spans: list[Span] = []
    oldest = salted
    for span in trace.spans:
        version = span.lo if span.is_attested else None
        rule = rules.get(version, "unknown") if version is not None else "unknown"
        if oldest is not None and version is not None and version.run == oldest.run:
            oldest = min(oldest, version)
        else:
            oldest = None
        context = {"own": version, "carried": oldest, "unknown": None}[rule]
        spans.append(span.model_copy(update={"context": context}))
    return trace.model_copy(update={"spans": tuple(spans)})
