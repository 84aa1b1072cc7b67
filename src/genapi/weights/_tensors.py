"""What can be read off a tensor, torch's or numpy's, without importing torch.

The rule of this file: a tensor that cannot travel as it is (no data, sharded, no array) is named
in a `ConfigError` together with what to pass instead.
"""

import sys
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from genapi.errors import ConfigError

__all__ = (
    "FROM_SAFETENSORS",
    "bytes_of",
    "describe",
    "element_bytes",
    "is_torch",
    "plain",
    "raw_bytes",
)

_WIDTHS = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,  # an element is a pair of numbers
}

FROM_SAFETENSORS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Names of dtypes in a safetensors header, and torch's."""


def element_bytes(dtype: str, *, name: str) -> int:
    """Bytes of one element of the dtype with this name.

    Raises:
        ConfigError: no such dtype; `name` is the tensor's, for the message.
    """
    width = _WIDTHS.get(dtype)
    if width is None:
        raise ConfigError(
            f"tensor {name!r} has the dtype {dtype!r}, which cannot be published; "
            f"cast it to one of {', '.join(_WIDTHS)}"
        )
    return width


def is_torch(tensor: object) -> bool:
    """Whether this is a torch tensor. Where torch was never imported, nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def _is_array(tensor: object) -> TypeGuard[npt.NDArray[Any]]:
    return isinstance(tensor, np.ndarray)


def describe(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    """Torch's name of the dtype, and the shape.

    Raises:
        ConfigError: it is neither a torch tensor nor a numpy array, or one without its data.
    """
    if is_torch(tensor):
        if hasattr(tensor, "full_tensor"):
            raise ConfigError(
                f"tensor {name!r} is sharded (a DTensor): yield tensor.full_tensor() for it"
            )
        if tensor.is_meta:
            raise ConfigError(f"tensor {name!r} is on the meta device and holds no data")
        if str(tensor.layout) != "torch.strided":
            raise ConfigError(f"tensor {name!r} is {tensor.layout}: yield tensor.to_dense() for it")
        return str(tensor.dtype).removeprefix("torch."), _sizes(tensor.shape)
    if _is_array(tensor):
        return tensor.dtype.name, _sizes(tensor.shape)
    raise ConfigError(
        f"{name!r} is a {type(tensor).__name__}: weights are torch tensors or numpy arrays"
    )


def plain(tensor: Any) -> Any:
    """The same data without gradient bookkeeping, in the machine's byte order; mostly no copy."""
    if _is_array(tensor):
        return tensor.astype(tensor.dtype.newbyteorder("="), copy=False)
    return tensor.detach()


def raw_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of an array in row-major order; no copy where they lie so."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def bytes_of(tensor: Any) -> memoryview:
    """The bytes of a tensor of torch's or numpy's, as they travel."""
    if is_torch(tensor):
        torch = sys.modules["torch"]
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        array: npt.NDArray[Any] = flat.numpy()
        return array.data
    return raw_bytes(tensor).data


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, shape))
