"""Token ids and identities: `TokenIds`, `WorkerId`, `Role`.

The rule of this file: ids are checked, never cast. `1.0`, `True` and `"1"` are not token ids.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any, overload

import numpy as np
import numpy.typing as npt
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from genapi.types.base import Value

__all__ = ("IdSequence", "Role", "TokenIds", "WorkerId")

MAX_ID = 2**31 - 1


def _checked(ids: Any) -> npt.NDArray[np.int32]:
    if isinstance(ids, np.ndarray):
        return _checked_array(ids)
    if isinstance(ids, str | bytes | dict) or not isinstance(ids, Iterable):
        message = f"token ids must be a sequence of ints, got {type(ids).__name__}"
        raise ValueError(message)  # noqa: TRY004 - pydantic wants ValueError
    items = list(ids)
    kinds = set(map(type, items))
    if not kinds <= {int}:
        for position, item in enumerate(items):
            if isinstance(item, bool | np.bool_) or not isinstance(item, int | np.integer):
                message = (
                    f"token id at position {position} is {item!r} ({type(item).__name__}); "
                    "ids are whole numbers, pass ints"
                )
                raise ValueError(message)  # noqa: TRY004 - pydantic wants ValueError
    if items and (min(items) < 0 or max(items) > MAX_ID):
        position = next(i for i, item in enumerate(items) if not 0 <= item <= MAX_ID)
        message = f"token id at position {position} is {items[position]}; ids lie in 0..{MAX_ID}"
        raise ValueError(message)
    return np.array(items, dtype=np.int32)


def _checked_array(ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        message = (
            f"token ids must be a flat integer array, got shape {ids.shape} and dtype {ids.dtype}"
        )
        raise ValueError(message)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > MAX_ID):
        bad = (ids < 0) | (ids > MAX_ID)
        position = int(np.argmax(bad))
        message = f"token id at position {position} is {ids[position]}; ids lie in 0..{MAX_ID}"
        raise ValueError(message)
    return ids.astype(np.int32)


class TokenIds(Sequence[int]):
    """An immutable sequence of token ids over one int32 buffer.

    Compares and hashes like a tuple of ints, slices to `TokenIds`, concatenates like a tuple
    (also with a list or an array on either side: never an element-wise sum), and
    `np.asarray(ids)` is a read-only view without a copy. JSON: a list of ints.

    Raises:
        ValueError: an item is not an int, is negative, or exceeds 2**31 - 1.
    """

    __slots__ = ("_array",)
    # numpy then leaves `array + ids` to __radd__ instead of adding numbers.
    __array_ufunc__ = None

    _array: npt.NDArray[np.int32]

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._array = ids._array if isinstance(ids, TokenIds) else _checked(ids)  # noqa: SLF001
        self._array.flags.writeable = False

    @classmethod
    def of_array(cls, array: npt.NDArray[np.int32]) -> "TokenIds":
        """Take over an int32 array that the caller has checked and no longer writes to."""
        self = cls.__new__(cls)
        array.flags.writeable = False
        self._array = array
        return self

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> "TokenIds": ...
    def __getitem__(self, index: int | slice) -> "int | TokenIds":
        if isinstance(index, slice):
            return TokenIds.of_array(self._array[index])
        return int(self._array[index])

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[int]:
        return iter(self._array.tolist())

    def __contains__(self, item: object) -> bool:
        return any(token == item for token in self.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return bool(np.array_equal(self._array, other._array))
        if isinstance(other, tuple | list):
            return self.tolist() == list(other)
        if isinstance(other, np.ndarray):
            return np.array_equal(self._array, other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._array.tolist()))

    def __add__(self, other: Iterable[int]) -> "TokenIds":
        if not isinstance(other, Sequence | np.ndarray) or isinstance(other, str | bytes):
            return NotImplemented
        return TokenIds.of_array(np.concatenate((self._array, TokenIds(other)._array)))

    def __radd__(self, other: Iterable[int]) -> "TokenIds":
        if not isinstance(other, Sequence | np.ndarray) or isinstance(other, str | bytes):
            return NotImplemented
        return TokenIds.of_array(np.concatenate((TokenIds(other)._array, self._array)))

    def __array__(
        self,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,  # noqa: FBT001 - numpy's
    ) -> npt.NDArray[Any]:
        if dtype is None or np.dtype(dtype) == np.int32:
            return self._array.copy() if copy else self._array
        if copy is False:
            message = "a view of token ids has dtype int32; another dtype needs a copy"
            raise ValueError(message)
        return self._array.astype(dtype)

    def __repr__(self) -> str:
        return f"TokenIds({self._array.tolist()})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._array.tobytes(),)

    def tolist(self) -> list[int]:
        """The ids as a list of Python ints."""
        ids: list[int] = self._array.tolist()
        return ids

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls,
            serialization=core_schema.plain_serializer_function_ser_schema(
                cls.tolist, when_used="json"
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_ID}}


def _unpickle(data: bytes) -> TokenIds:
    return TokenIds.of_array(np.frombuffer(data, dtype=np.int32))


def _id_sequence(ids: Any) -> TokenIds:
    return ids if isinstance(ids, TokenIds) else TokenIds(ids)


class _HoldsTokenIds:
    """Marks a field that is annotated with what users pass and holds `TokenIds`."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(TokenIds)


IdSequence = Annotated[Sequence[int], _HoldsTokenIds]
"""An input field of token ids: any sequence of ints goes in, `TokenIds` comes out."""


class Role(StrEnum):
    """What a worker does with a request."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerId(Value):
    """Names one life of one server process; a restart makes a new one.

    Attributes:
        provider: `vllm`, `sglang` or `dynamo`.
        namespace: Dynamo's namespace, else empty.
        component: Dynamo's component, else the worker's address.
        instance: what changes with a restart: vLLM's `instance_id`, SGLang's `startup_time`,
            Dynamo's `instance_id`; where none can be read, a count of reconnects.
    """

    provider: str
    namespace: str = ""
    component: str = ""
    instance: str

    def __hash__(self) -> int:  # of `Value`, but faster: it is the key of every table of workers
        return hash((self.provider, self.namespace, self.component, self.instance))

    def __str__(self) -> str:
        parts = (self.provider, self.namespace, self.component, self.instance)
        return "/".join(part for part in parts if part)
