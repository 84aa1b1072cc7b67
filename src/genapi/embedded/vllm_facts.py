"""Flags and environment of a vLLM server, and what the server tells of itself."""

from dataclasses import dataclass
from typing import Any, Literal

from .engine import EngineConfig

__all__ = ("BACKEND", "VllmFlags", "model_list", "vllm_config")

BACKEND = "genapi_memory"
"""Name of the only weight transfer backend there is."""


@dataclass(frozen=True, slots=True)
class VllmFlags:
    """Flags and environment of a vLLM server; the defaults are those of an RL worker."""

    version: Literal["0.31.0", "0.32.0", "0.33.0"] = "0.32.0"
    model: str = "tiny"
    api_key: str | None = None
    dev_mode: bool = True
    scale_out: bool = True
    weight_transfer: bool = True
    prompt_tokens_details: bool = False
    reasoning_parser: bool = False
    enable_sleep_mode: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    kv_connector: str | None = None
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"

    @property
    def replica_size(self) -> int:
        """Ranks of one data parallel replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def is_line(self, line: str) -> bool:
        """Whether the version is one of a line such as "0.31"."""
        return self.version.startswith(f"{line}.")


def model_list(
    flags: VllmFlags, engine: EngineConfig, *, created: int, permission_id: str
) -> dict[str, Any]:
    """The body of `/v1/models`."""
    permission = {
        "id": f"modelperm-{permission_id}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": flags.model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": flags.model,
        "parent": None,
        "max_model_len": engine.max_model_len,
        "permission": [permission],
    }
    return {"object": "list", "data": [card]}


def vllm_config(flags: VllmFlags, engine: EngineConfig, *, instance_id: str) -> dict[str, Any]:
    """The part of `vllm_config` in `/server_info` that clients read."""
    return {
        "model_config": {
            "model": flags.model,
            "served_model_name": flags.model,
            "dtype": "torch.float32",
            "seed": engine.seed,
            "max_model_len": engine.max_model_len,
            "max_logprobs": 20,
            "logprobs_mode": engine.logprobs_mode,
            "enable_sleep_mode": flags.enable_sleep_mode,
        },
        "cache_config": {
            "block_size": engine.block_size,
            "enable_prefix_caching": engine.prefix_caching,
        },
        "parallel_config": {
            "pipeline_parallel_size": flags.pipeline_parallel_size,
            "tensor_parallel_size": flags.tensor_parallel_size,
            "data_parallel_size": flags.data_parallel_size,
            "data_parallel_rank": 0,
            "data_parallel_index": 0,
            "data_parallel_external_lb": False,
            "data_parallel_hybrid_lb": False,
            "world_size": flags.replica_size,
            "rank": 0,
        },
        "scheduler_config": {"max_num_seqs": engine.max_num_seqs, "policy": "fcfs"},
        "lora_config": None,
        "kv_transfer_config": _kv_transfer_config(flags, engine_id=instance_id),
        "instance_id": instance_id,
        "weight_transfer_config": {"backend": BACKEND} if flags.weight_transfer else None,
    }


def _kv_transfer_config(flags: VllmFlags, *, engine_id: str) -> dict[str, Any] | None:
    """What is told of a KV connector.

    The embedded engine has none, as if it were one for prefill/decode pairs: without parameters in
    a request those do nothing.
    """
    if flags.kv_connector is None:
        return None
    return {
        "kv_connector": flags.kv_connector,
        "engine_id": engine_id,
        "kv_buffer_device": "cpu",
        "kv_role": flags.kv_role,
        "kv_port": 14579,
        "kv_connector_extra_config": {},
        "kv_connector_module_path": None,
        "enable_permute_local_kv": False,
        "kv_load_failure_policy": "fail",
    }
