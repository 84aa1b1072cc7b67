"""vLLM 0.31 to 0.33 over its own routes: tokens in, tokens out, and its weight updates.

The rule of this package: what the recorded exchanges show is true; a behaviour that was only
read in the source is marked so where it is used.
"""

from genapi.providers.vllm.launch import Launch
from genapi.providers.vllm.options import Options

__all__ = ("Launch", "Options")
