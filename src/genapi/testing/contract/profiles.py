"""The providers that genapi brings, as the contract suite has to know them. One entry each."""

from .stand import Profile

__all__ = ("PROFILES",)

_RPC = "/engine/update_weights_from_distributed"

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
            "sleep": "/sleep",
        },
        sleeping={"enable_sleep_mode": "true"},
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
    Profile(
        provider="dynamo",
        front="{0}?discovery={1}",
        logprobs_mode="processed",
        paths={
            "health": "/engine/liveness_probe",
            "generate": "/v1/completions",
            "join": "/engine/init_weights_update_group",
            "pause": "/engine/pause_generation",
            "resume": "/engine/resume_generation",
            "begin": f"{_RPC} start_weight_update",
            "update": f"{_RPC} update_info",
            "finish": f"{_RPC} finish_weight_update",
            "label": "/engine/set_weight_version",
            "sleep": "/engine/control/sleep",
        },
        excluded={
            "ready:key": "a frontend takes no key",
            "ready:paused": "its worker of vLLM tells nobody whether it is paused",
            "publish:paused": "its worker of vLLM tells nobody whether it is paused",
            "generate:outputs": "it gives ids for one output a request",
            "generate:remark": "its workers give the scores of the draw",
            "generate:vocabulary": "it does not tell how large its vocabulary is, and refuses "
            "without naming the id",
            "generate:session": "the frontend chooses the worker",
            "publish:kept": "nothing is attested: a reply has an interval",
            "publish:kept-stale": "nothing is attested: a reply has an interval",
            "publish:other-life": "another process is another member, whom the next publication "
            "reaches",
            "publish:checksum": "no worker digests what it holds",
            "publish:lost-label": "the label comes with the end of the session",
        },
    ),
)
