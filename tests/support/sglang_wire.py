"""Short ways to write SGLang requests, replies and streams in tests, and its recorded exchanges."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from genapi import GenerateRequest, SamplingParams
from genapi.providers.sglang.provider import SGLang
from genapi.types.response import GenerateResponse
from genapi.wire.http import HTTPReply
from tests.support.wire import context, streamed

PROMPT = [5, 6, 7, 8]
URL = "http://w1:30000"
PROVIDER = SGLang()
ROOT = Path(__file__).parents[1] / "transcripts" / "sglang"


def load(name: str) -> dict[str, Any]:
    """The recorded exchange of that name: `request` and `response`."""
    found: dict[str, Any] = json.loads((ROOT / f"{name}.json").read_text())
    return found


def recorded(name: str) -> HTTPReply:
    """The recorded answer of that name."""
    exchange = load(name)
    answer = exchange["response"]
    body = answer.get("body", "")
    if "raw_lines" in answer:
        content = "\n".join([*answer["raw_lines"], ""]).encode()
    else:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return HTTPReply(answer["status"], content, {}, URL + exchange["request"]["path"])


def request(
    *, prompt: list[int] | None = None, lora: str | None = None, **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(
        prompt_token_ids=PROMPT if prompt is None else prompt,
        lora=lora,
        sampling=SamplingParams(**{"max_tokens": 16, **sampling}),
    )


def asked_for(name: str, **more: Any) -> GenerateRequest:
    """The request that a recorded generation answers, as far as decoding looks at it."""
    sent = load(name)["request"]["json"]
    sampling = sent["sampling_params"]
    wanted = {
        "max_tokens": sampling["max_new_tokens"],
        "temperature": float(sampling.get("temperature", 1.0)),
        "stop_token_ids": sampling.get("stop_token_ids", []),
        "logprobs": sent.get("top_logprobs_num", 0) if sent.get("return_logprob") else None,
        "prompt_logprobs": 0 if sent.get("logprob_start_len") == 0 else None,
    }
    return request(prompt=sent["input_ids"], **{**wanted, **more})


def scored(ids: list[int], *values: float | None) -> list[list[Any]]:
    """Score entries, -1 for each token unless given."""
    given = values or (-1.0,) * len(ids)
    return [[value, token, None] for value, token in zip(given, ids, strict=True)]


STOP = {"type": "stop", "matched": 2}
LENGTH = {"type": "length", "length": 16}
ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def output(
    ids: list[int],
    finish: Mapping[str, Any] | None = None,
    *,
    total: int | None = None,
    **meta: Any,
) -> dict[str, Any]:
    """A reply, or one frame of a stream that has `total` tokens so far."""
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "id": "w",
            "finish_reason": finish,
            "prompt_tokens": 4,
            "weight_version": "default",
            "input_token_logprobs": [],
            "output_token_logprobs": scored(ids),
            "completion_tokens": len(ids) if total is None else total,
            "cached_tokens": 0,
            **meta,
        },
        "prompt_token_ids": PROMPT,
    }


def decode(body: Any, asked: GenerateRequest, **more: Any) -> GenerateResponse:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return PROVIDER.decode(HTTPReply(200, content, {}, f"{URL}/generate"), context(asked, **more))


stream = partial(streamed, PROVIDER)
