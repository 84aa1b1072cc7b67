"""What runs inside an engine's process: the receiving end of genapi's weight transfer.

The rule of this package: it imports torch and the engine it serves, and nothing else of genapi,
so that it works in the engine's own environment after `pip install --no-deps` of genapi.

* `receiver`: the receiving rank of a gloo group, and the wire layout that both ends follow.
* `vllm`: the vLLM weight-transfer backend `genapi_gloo` on top of it.
"""
