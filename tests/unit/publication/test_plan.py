"""How a publication treats requests in flight and caches."""

from itertools import product

import pytest

from genapi.errors import ConfigError
from genapi.publication.plan import PausePlan


@pytest.mark.parametrize(
    ("field", "known"),
    [
        ("mode", "abort, drain, keep"),
        ("in_flight_kv", "recompute, stale"),
        ("prefix_cache", "flush, salt, stale"),
    ],
)
def test_an_unknown_value_is_refused_with_those_that_there_are(field: str, known: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PausePlan(**{field: "wait"})  # type: ignore[arg-type]
    assert str(caught.value) == f"{field}='wait': choose one of {known}"


@pytest.mark.parametrize("mode", ["abort", "drain"])
def test_keys_and_values_can_be_left_stale_only_where_requests_are_kept(mode: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PausePlan(mode, "stale")  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"in_flight_kv='stale' needs mode='keep'; mode={mode!r} leaves no request in flight whose "
        "keys and values could be kept"
    )


def test_every_other_combination_is_a_plan() -> None:
    caches = ("flush", "salt", "stale")
    for mode, cache in product(("abort", "drain", "keep"), caches):
        assert PausePlan(mode, "recompute", cache).prefix_cache == cache  # type: ignore[arg-type]
    assert PausePlan("keep", "stale").in_flight_kv == "stale"
    assert PausePlan() == PausePlan("keep", "recompute", "salt")
