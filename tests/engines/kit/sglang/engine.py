"""How a real SGLang server is started on a machine without a GPU."""

from __future__ import annotations

from genapi.providers import sglang
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
    "--device=cpu",
    "--attention-backend=torch_native",
    "--max-total-tokens=16384",
    "--mem-fraction-static=0.2",
    "--disable-overlap-schedule",
    "--skip-server-warmup",
    "--sleep-on-idle",  # else an idle or paused scheduler keeps a core busy
)


SGLANG = Engine(
    scheme="sglang",
    kind=sglang.Launch,
    fields={"flags": FLAGS, "environment": SETTINGS},
    ready="/ready",  # /health generates
)
