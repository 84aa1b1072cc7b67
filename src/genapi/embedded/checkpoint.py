"""Parameters from a folder of safetensors files, without a library for it.

A file is eight bytes of length, that much JSON, and the bytes of the tensors.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ("DTYPES", "from_bytes", "read_checkpoint")

DTYPES: Mapping[str, str] = {
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "bfloat16": "<u2",
}
"""How numpy reads the bytes of a dtype; bfloat16 is the upper half of a float32."""

_SHORT = {"F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16"}


def from_bytes(raw: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A tensor as float32.

    Raises:
        ValueError: The bytes are not as many as the shape takes.
    """
    code = DTYPES[dtype]
    if len(raw) != math.prod(shape) * np.dtype(code).itemsize:
        raise ValueError(f"shape {list(shape)} of {dtype} is invalid for input of {len(raw)} bytes")
    array: NDArray[Any] = np.frombuffer(raw, dtype=code).reshape(shape)
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return np.array(array, dtype=np.float32)


def read_checkpoint(folder: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Names and parameters of every file in `folder`, in the order of their names.

    Raises:
        FileNotFoundError: The folder has no such file.
        ValueError: A file is not one, or is cut short, or has a dtype that is none of `DTYPES`.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"Cannot find any model weights with `{folder}`")
    for file in files:
        raw = file.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        if start > len(raw):
            raise ValueError("Error while deserializing header: invalid header length")
        entries = json.loads(raw[8:start])
        entries.pop("__metadata__", None)
        if start + max(e["data_offsets"][1] for e in entries.values()) != len(raw):
            raise ValueError(
                "Error while deserializing header: incomplete metadata, file not fully covered"
            )
        for name, entry in entries.items():
            dtype = _SHORT.get(entry["dtype"])
            if dtype is None:
                raise ValueError(f"{file.name}: tensor {name!r} is {entry['dtype']}")
            begin, end = entry["data_offsets"]
            yield name, from_bytes(raw[start + begin : start + end], dtype, tuple(entry["shape"]))
