"""Weights to publish and the ways they travel.

Nothing here imports torch: what needs it imports it on first use.
"""

from genapi.weights.base import TensorMeta, WeightSource, WeightTransport
from genapi.weights.filesystem import Filesystem
from genapi.weights.gloo import Gloo
from genapi.weights.memory import Memory
from genapi.weights.sources import from_module, from_safetensors, from_tensors

__all__ = (
    "Filesystem",
    "Gloo",
    "Memory",
    "TensorMeta",
    "WeightSource",
    "WeightTransport",
    "from_module",
    "from_safetensors",
    "from_tensors",
)
