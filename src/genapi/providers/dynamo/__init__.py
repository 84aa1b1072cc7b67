"""Dynamo 1.6: a frontend that routes, and workers that are administered one by one.

`Options` holds what a request can ask of Dynamo alone, and `Launch` says how a deployment is
started. Everything else is reached through `genapi.connect("dynamo://...")`.
"""

from genapi.providers.dynamo.launch import Launch
from genapi.providers.dynamo.options import Options

__all__ = ("Launch", "Options")
