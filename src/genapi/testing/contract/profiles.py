"""The providers that genapi brings, as the contract suite has to know them. One entry each."""

from .stand import Profile

__all__ = ("PROFILES",)

PROFILES: tuple[Profile, ...] = (
    Profile(
        provider="vllm",
        logprobs_mode="raw",
        paths={
            "health": "/health",
            "generate": "/inference/v1/generate",
            "join": "/init_weight_transfer_engine",
            "pause": "/pause",
            "resume": "/resume",
            "begin": "/start_weight_update",
            "update": "/update_weights",
            "finish": "/finish_weight_update",
            "label": "/update_weight_version",
        },
        excluded={
            "publish:lost-label": "the label comes with the end of the session",
        },
    ),
    Profile(
        provider="sglang",
        logprobs_mode="scaled",
        paths={
            "health": "/ping",
            "generate": "/generate",
            "join": "/init_weights_update_group",
            "pause": "/pause_generation",
            "resume": "/continue_generation",
            "begin": "/begin_weight_update",
            "update": "/update_weights_from_distributed",
            "finish": "/end_weight_update",
            "label": "/update_weight_version",
        },
        excluded={
            "generate:seed": "a server takes seeds with --enable-deterministic-inference alone, "
            "which no CPU has",
            "generate:remark": "its scores are of the distribution at the request's temperature",
            "generate:vocabulary": "it does not tell how large its vocabulary is, and an id beyond "
            "it ends the server",
            "publish:drain": "it cannot let requests end while it holds new ones back",
            "publish:asleep": "nothing says that a server's memory was released",
        },
    ),
)
