"""SGLang 0.5.19 to 0.5.23 over its native routes: tokens in, tokens out, and its weight updates.

The rule of this package: what the recorded exchanges show is true; a behaviour that was only
read in the source is marked so where it is used.
"""

from genapi.providers.sglang.launch import Gateway, Launch
from genapi.providers.sglang.options import Options

__all__ = ("Gateway", "Launch", "Options")
