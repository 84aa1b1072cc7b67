"""What Dynamo's Python worker passes on to its engine: methods by name, their results dropped.

The session machine and the loads are vLLM's own; nothing hides a path in what they say.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .engine import Engine
from .vllm_weights import PeerLost, WeightSession, WorkerError

__all__ = ("FAILED", "Rpc")

FAILED = (
    "Call to collective_rpc method failed: Worker failed with error '{}', please check the stack "
    "trace above for the root cause"
)


class Rpc:
    """The methods of an engine's workers."""

    def __init__(self, engine: Engine, session: WeightSession, *, extension: bool) -> None:
        self._engine = engine
        self._session = session
        self._methods: dict[str, Callable[..., object]] = {
            "check_health": lambda: None,
            "finish_weight_update": session.finish,
            "init_weight_transfer_engine": self._init,
            "reload_weights": self._reload,
            "start_weight_update": session.start,
            "update_weights": session.update,
        }
        if extension:
            # What a worker extension of somebody's own adds (`--worker-extension-cls`).
            self._methods |= {
                "destroy_broadcaster": lambda: None,
                "init_broadcaster": lambda **_: None,
                "update_weights_from_path": self._scale,
            }

    def call(
        self,
        method: str,
        arguments: Mapping[str, Any],
        *,
        arrays: Sequence[Any] | None = None,
        lost: PeerLost | None = None,
    ) -> None:
        """Run a method on every worker.

        Raises:
            WorkerError: It failed; the text is the worker's.
        """
        found = self._methods.get(method)
        if found is None:
            raise WorkerError(f"'CPUWorker' object has no attribute '{method}'")
        try:
            if method == "update_weights":
                self._session.update(arguments.get("update_info", {}), arrays=arrays, lost=lost)
            else:
                found(**arguments)
        except TypeError as error:
            raise WorkerError(str(error)) from error

    def _init(self, init_info: Mapping[str, Any]) -> None:
        self._session.init(init_info)

    def _reload(self, weights_path: str, *, is_checkpoint_format: bool = True) -> None:
        del is_checkpoint_format  # there is no other format
        self._session.reload(weights_path)

    def _scale(self, scale: float = 1.0) -> None:
        weights = {name: array * scale for name, array in self._engine.weights.items()}
        self._engine.install(weights)
