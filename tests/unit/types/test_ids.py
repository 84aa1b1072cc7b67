"""`TokenIds` and identities."""

import pickle
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from genapi import TokenIds, WorkerId


def test_token_ids_behave_like_a_tuple_of_ints() -> None:
    ids = TokenIds([3, 1, 2])
    assert ids == (3, 1, 2)
    assert ids == [3, 1, 2]
    assert hash(ids) == hash((3, 1, 2))
    assert list(ids) == [3, 1, 2]
    assert (ids[0], ids[-1], ids[1:]) == (3, 2, TokenIds([1, 2]))
    assert 1 in ids
    assert 7 not in ids
    assert (ids.index(2), ids.count(3)) == (2, 1)
    assert all(type(i) is int for i in ids)


def test_an_index_beyond_the_end_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        TokenIds([1])[1]


@pytest.mark.parametrize("other", [[7, 8], (7, 8), TokenIds([7, 8]), np.array([7, 8])])
def test_adding_concatenates_on_either_side_and_never_sums(other: Any) -> None:
    ids = TokenIds([1, 2])
    assert ids + other == (1, 2, 7, 8)
    assert other + ids == (7, 8, 1, 2)


def test_as_an_array_they_are_a_read_only_view() -> None:
    ids = TokenIds([1, 2])
    array = np.asarray(ids)
    assert array.dtype == np.int32
    assert np.shares_memory(array, np.asarray(ids))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9
    assert np.asarray(ids, dtype=np.int64).dtype == np.int64
    with pytest.raises(ValueError, match="int32"):
        np.array(ids, dtype=np.int64, copy=False)


def test_they_do_not_follow_the_array_that_they_were_made_of() -> None:
    source = np.array([1, 2], dtype=np.int32)
    ids = TokenIds(source)
    source[0] = 9
    assert ids == [1, 2]


def test_a_pickled_copy_is_equal_and_read_only() -> None:
    ids = pickle.loads(pickle.dumps(TokenIds([1, 2])))  # noqa: S301 - our own bytes
    assert ids == [1, 2]
    assert not np.asarray(ids).flags.writeable


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ([1, -2], "position 1 is -2"),
        ([1.0], r"position 0 is 1\.0 \(float\)"),
        ([True], "position 0 is True"),
        (["1"], "position 0 is '1'"),
        ([None], "position 0 is None"),
        ([2**31], "2147483648; ids lie in 0..2147483647"),
        ("12", "got str"),
        (b"12", "got bytes"),
        ({1: 2}, "got dict"),
        (7, "got int"),
        (np.array([1.5]), "float64"),
        (np.array([[1]]), r"shape \(1, 1\)"),
        (np.array([True]), "bool"),
        (np.array([1, -1]), "position 1 is -1"),
        (np.array([2**31], dtype=np.int64), "position 0 is 2147483648"),
    ],
)
def test_what_is_no_token_id_is_named(bad: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TokenIds(bad)
    with pytest.raises(ValidationError, match=named):
        TypeAdapter(TokenIds).validate_python(bad)


def test_integers_of_numpy_are_ids() -> None:
    scalars: Any = [np.int64(5), np.int32(6)]
    assert TokenIds(scalars) == [5, 6]
    assert TokenIds(np.array([5], dtype=np.uint16)) == [5]


def test_a_worker_id_names_one_life_of_a_process() -> None:
    first = WorkerId(provider="vllm", component="w1:8001", instance="1")
    second = first.model_copy(update={"instance": "2"})
    assert first != second
    assert str(first) == "vllm/w1:8001/1"
    assert len({first, second, WorkerId(provider="vllm", component="w1:8001", instance="1")}) == 2
