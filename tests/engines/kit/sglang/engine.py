"""How a real SGLang server is started on a machine without a GPU."""

from __future__ import annotations

import pathlib

from tests.engines.kit.server import STAND_INS, Engine

__all__ = ("SGLANG",)

# Each with the reason why a server on a small machine without a GPU needs it.
SETTINGS = {
    "PYTHONPATH": str(STAND_INS),
    "STAND_INS": "sgl_kernel,torchvision,triton",
    "SGLANG_USE_CPU_ENGINE": "1",  # else it does not believe --device=cpu
    "OMP_NUM_THREADS": "1",  # several servers share the cores
    "GLOO_SOCKET_IFNAME": "lo",  # gloo would listen at whatever the host's name is resolved to
    "HF_HUB_OFFLINE": "1",
}
FLAGS = (
    "--host=127.0.0.1",
    "--served-model-name=tiny",
    "--device=cpu",
    "--attention-backend=torch_native",
    "--dtype=float32",
    "--context-length=4096",
    "--max-total-tokens=16384",
    "--mem-fraction-static=0.2",
    "--disable-overlap-schedule",
    "--skip-server-warmup",
    "--sleep-on-idle",  # else an idle or paused scheduler keeps a core busy
)


def _variables(folder: pathlib.Path, _: pathlib.Path) -> dict[str, str]:
    # A file, where the ranks' own store would listen at every interface.
    meeting = f"file://{folder / 'rendezvous'}"
    return SETTINGS | {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": meeting}


SGLANG = Engine(
    scheme="sglang",
    module="sglang.launch_server",
    model_flag="--model-path",
    flags=FLAGS,
    variables=_variables,
    ready="/ready",  # /health generates
)
