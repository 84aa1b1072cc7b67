"""A shared mapping is to every reader the plain dict that it stands for."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genapi.publication.shared import Shared

CONTENTS = st.dictionaries(st.integers(), st.integers(), max_size=40)
CHANGES = st.lists(st.tuples(st.integers(min_value=0), st.integers()), max_size=20)


@given(CONTENTS, CHANGES)
def test_it_reads_as_the_dict_with_the_same_changes(
    content: dict[int, int], changes: Sequence[tuple[int, int]]
) -> None:
    now, copies = dict(content), [Shared.of(content)]
    steps = [dict(content)]
    for number, value in changes if content else ():
        key = list(content)[number % len(content)]
        now[key] = value
        copies.append(copies[-1].having(key, value))
        steps.append(dict(now))
    for copy, step in zip(copies, steps, strict=True):
        assert copy == step
        assert list(copy.items()) == list(step.items())
        assert len(copy) == len(step)


@given(CONTENTS, st.integers())
def test_a_key_that_is_not_there_is_not_added(content: dict[int, int], key: int) -> None:
    shared = Shared.of({k: v for k, v in content.items() if k != key})
    with pytest.raises(KeyError):
        shared.having(key, 1)
    assert key not in shared


def test_what_is_shared_already_is_taken_as_it_is() -> None:
    shared = Shared.of({1: 2})
    assert Shared.of(shared) is shared
