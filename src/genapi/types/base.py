"""`Value`: the one base of every public model, and how arrays behave inside one.

The rule of this file: a value never changes after it was built, also not through pickle,
`copy.deepcopy` or `model_copy`, and two values are equal when what they hold is equal
(arrays by content, NaN equal to NaN).
"""

from typing import Annotated, Any, NoReturn, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

__all__ = ("BoolMask", "Float32Array", "FrozenDict", "Value", "float32_array")

K = TypeVar("K")
V = TypeVar("V")
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]


def float32_array(data: Any) -> FloatArray:
    """A read-only one-dimensional float32 array of `data`; None inside becomes NaN."""
    if isinstance(data, np.ndarray) and data.dtype == np.float32 and not data.flags.writeable:
        array = data
    else:
        if not isinstance(data, np.ndarray):
            data = [np.nan if item is None else item for item in data]
        array = np.array(data, dtype=np.float32)
    if array.ndim != 1:
        message = f"expected a flat list of numbers, got an array of shape {array.shape}"
        raise ValueError(message)
    array.flags.writeable = False
    return array


def _to_json(array: FloatArray) -> list[float | None]:
    # float(np.float32) widens exactly, so that narrowing on the way back is exact as well.
    return [None if value != value else value for value in array.tolist()]  # noqa: PLR0124 - NaN


Float32Array = Annotated[
    FloatArray,
    BeforeValidator(float32_array),
    PlainSerializer(_to_json, when_used="json"),
    WithJsonSchema({"type": "array", "items": {"type": ["number", "null"]}}),
]
"""Read-only float32 vector; JSON: a list in which null is NaN. Bit-exact through JSON."""


def _bool_array(data: Any) -> BoolArray:
    array = np.array(data, dtype=np.bool_)
    if array.ndim != 1:
        raise ValueError(f"expected a flat list of booleans, got an array of shape {array.shape}")
    array.flags.writeable = False
    return array


BoolMask = Annotated[
    BoolArray,
    BeforeValidator(_bool_array),
    PlainSerializer(lambda array: array.tolist(), return_type=list[bool], when_used="json"),
    WithJsonSchema({"type": "array", "items": {"type": "boolean"}}),
]
"""Read-only bool vector; JSON: a list."""


class FrozenDict(dict[K, V]):
    """A dict that cannot be changed; it pickles and copies as one."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("what a value holds cannot be changed; build another value")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


def _frozen(item: Any) -> Any:
    if isinstance(item, np.ndarray):
        item.flags.writeable = False
    return item


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return (
            isinstance(left, np.ndarray)
            and isinstance(right, np.ndarray)
            and left.dtype == right.dtype
            and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
        )
    return bool(left == right)


class Value(BaseModel):
    """Base of genapi's public models: frozen, closed to unknown fields, compared by content."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        ser_json_inf_nan="null",
        allow_inf_nan=False,
        validate_default=False,
        protected_namespaces=(),
        hide_input_in_errors=True,  # an input may hold a key
    )

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        left, right = self.__dict__, other.__dict__
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)

    def __hash__(self) -> int:
        items = self.__dict__.values()
        return hash((type(self), *(v.tobytes() if isinstance(v, np.ndarray) else v for v in items)))

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        for item in self.__dict__.values():
            _frozen(item)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        # What a value holds is immutable already: a deeper copy would only lose read-only flags.
        return self.__copy__()
