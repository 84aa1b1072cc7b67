"""Flags and environment of a SGLang server, and what the server tells of itself."""

from dataclasses import dataclass
from typing import Any, Literal

from .engine import EngineConfig

__all__ = ("BACKEND", "SglangFlags", "load_report", "model_info", "model_list", "server_info")

BACKEND = "genapi_memory"
"""Name of the only backend that an update group can have here."""


@dataclass(frozen=True, slots=True)
class SglangFlags:
    """Flags and environment of a SGLang server; the defaults are the real ones."""

    version: Literal["0.5.23"] = "0.5.23"
    model: str = "tiny"
    weight_version: str = "default"
    api_key: str | None = None
    admin_api_key: str | None = None
    page_size: int = 1
    stream_interval: int = 1
    incremental_streaming_output: bool = False
    enable_deterministic_inference: bool = False
    return_original_logprob: bool = False
    """The server's `SGLANG_RETURN_ORIGINAL_LOGPROB`."""
    health_generation: bool = True
    """The server's `SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION`."""
    health_timeout_s: float = 20.0
    """The server's `SGLANG_HEALTH_CHECK_TIMEOUT`."""
    tp_size: int = 1
    dp_size: int = 1
    attn_dp_size: int = 1
    pp_size: int = 1
    disaggregation_mode: Literal["null", "prefill", "decode"] = "null"
    reasoning_parser: bool = False
    tool_call_parser: bool = False

    @property
    def ranks(self) -> int:
        """How many schedulers with a queue of their own there are."""
        return self.dp_size * self.attn_dp_size


def model_info(flags: SglangFlags, *, model_path: str, version: str) -> dict[str, Any]:
    """The body of `/model_info`."""
    return {
        "model_path": model_path,
        "served_model_name": model_path,
        "tokenizer_path": flags.model,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": version,
        "load_format": "auto",
        "reasoning_parser": "qwen3" if flags.reasoning_parser else None,
        "tool_call_parser": "qwen" if flags.tool_call_parser else None,
        "disaggregation_mode": flags.disaggregation_mode,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "tiny",
        "architectures": ["TinyForCausalLM"],
        "embedding": {"family": "none", "task": "none", "enabled": False},
    }


def model_list(model: str, engine: EngineConfig, *, created: int) -> dict[str, Any]:
    """The body of `/v1/models`."""
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "sglang",
        "root": model,
        "parent": None,
        "max_model_len": engine.max_model_len,
    }
    return {"object": "list", "data": [card]}


def server_info(flags: SglangFlags, engine: EngineConfig, *, instance_id: str) -> dict[str, Any]:
    """The part of `/server_info` that clients read.

    It tells the keys, as the real one does. Nothing in it is an id of the process, but the times of
    its start differ from one to the next.
    """
    started_s = int(instance_id) % 10**12 / 1e9
    startup: dict[str, Any] = {
        "load_weight": 0.5,
        "kv_cache_allocation": 1.0,
        "scheduler_e2e": started_s,
        "cuda_graph": {"prefill": 0.0, "decode": 0.0},
        "tokenizer_e2e": started_s + 1.0,
    }
    command = f"--model-path {flags.model} --context-length {engine.max_model_len}"
    for option, key in (("api-key", flags.api_key), ("admin-api-key", flags.admin_api_key)):
        command += "" if key is None else f" --{option} {key}"
    arguments: dict[str, Any] = {
        "model_path": flags.model,
        "served_model_name": flags.model,
        "host": "127.0.0.1",
        "port": 30000,
        "context_length": engine.max_model_len,
        "dtype": "float32",
        "random_seed": engine.seed,
        "page_size": flags.page_size,
        "disable_radix_cache": not engine.prefix_caching,
        "stream_interval": flags.stream_interval,
        "incremental_streaming_output": flags.incremental_streaming_output,
        "enable_deterministic_inference": flags.enable_deterministic_inference,
        "skip_tokenizer_init": False,
        "tp_size": flags.tp_size,
        "dp_size": flags.dp_size,
        "attn_dp_size": flags.attn_dp_size,
        "pp_size": flags.pp_size,
        "ep_size": 1,
        "nnodes": 1,
        "node_rank": 0,
        "dist_init_addr": None,
        "enable_dp_attention": False,
        "enable_lora": None,
        "weight_version": flags.weight_version,
        "disaggregation_mode": flags.disaggregation_mode,
        "disaggregation_bootstrap_port": 8998,
        "enable_memory_saver": False,
        "enable_metrics": False,
        "api_key": flags.api_key,
        "admin_api_key": flags.admin_api_key,
    }
    state = arguments | {"world_size": flags.tp_size * flags.pp_size, "startup_time": startup}
    return arguments | {
        "version": flags.version,
        "frontend": "python",
        "startup_time": startup,
        "launch_command": command,
        "status": "ready",
        "max_total_num_tokens": engine.cache_blocks * engine.block_size,
        "kv_events": None,
        "internal_states": [state for _ in range(flags.ranks)],
    }


def load_report(
    flags: SglangFlags, engine: EngineConfig, *, running: int, waiting: int, now: float
) -> dict[str, Any]:
    """The body of `/v1/loads`, without its moments and memory."""
    loads = [
        {
            "timestamp": now,
            "dp_rank": rank,
            "num_running_reqs": running if rank == 0 else 0,
            "num_waiting_reqs": waiting if rank == 0 else 0,
            "max_total_num_tokens": engine.cache_blocks * engine.block_size,
            "max_running_requests": engine.max_num_seqs,
        }
        for rank in range(flags.ranks)
    ]
    return {"version": flags.version, "loads": loads}
