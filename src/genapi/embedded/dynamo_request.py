"""A Dynamo frontend's reading of generation requests, with its words where they were recorded.

Fields that the frontend does not know are refused, others are taken and dropped: both as it does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .calls import Call
from .dynamo_shapes import bad_request, nested, overlong, read_json, refused
from .sampling import Sampling
from .texts import chat_tokens, tokens_of

__all__ = ("Generate", "read_inference", "read_openai")

_NVEXT = (
    "greed_sampling",
    "use_raw_prompt",
    "annotations",
    "backend_instance_id",
    "token_data",
    "max_thinking_tokens",
    "cache_salt",
    "extra_fields",
    "metadata_upload",
    "prefill_worker_id",
    "decode_worker_id",
    "dp_rank",
    "prefill_dp_rank",
    "agent_hints",
    "request_timestamp_ms",
    "routing_constraints",
    "router",
)
_SHARED = frozenset(
    [
        "model",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "seed",
        "stop",
        "frequency_penalty",
        "repetition_penalty",
        "stop_token_ids",
        "ignore_eos",
        "n",
        "logit_bias",
        "logprobs",
        "prompt_logprobs",
        "skip_special_tokens",
        "guided_json",
        "guided_regex",
        "guided_grammar",
        "guided_choice",
        "cache_salt",
        "include_stop_str_in_output",
        "user",
        "return_tokens_as_token_ids",
        "nvext",
        "allowed_token_ids",
        "metadata",
        "stream",
        "stream_options",
    ]
)
_OF_COMPLETIONS = frozenset(["prompt", "suffix", "echo", "best_of"])
_OF_CHATS = frozenset(
    [
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
        "max_completion_tokens",
        "top_logprobs",
        "chat_template_args",
        "chat_template_kwargs",
    ]
)
_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_DESERIALIZE = "Failed to deserialize the JSON body into the target type"
_MAX_TEMPERATURE = _MAX_REPETITION = 2.0


@dataclass(frozen=True, slots=True)
class Generate:
    """A checked request for one output."""

    prompt: tuple[int, ...]
    sampling: Sampling
    stream: bool = False
    include_usage: bool = False
    salt: str | None = None
    fields: frozenset[str] = frozenset()
    decode: int | None = None
    """The worker that has to serve it."""
    prefill: int | None = None
    chat: bool = False
    ids_as_tokens: bool = False
    """Whether tokens are named by their ids where their texts would be."""

    def goes_on(self, output: list[int]) -> "Generate":
        """What is left of it, for another worker, after so much output."""
        left = self.sampling.max_tokens - len(output)
        sampling = replace(self.sampling, max_tokens=left, prompt_logprobs=None)
        return replace(self, prompt=(*self.prompt, *output), sampling=sampling)


def read_openai(
    call: Call, *, models: Mapping[str, Any], vocab: int, room: int, chat: bool
) -> Generate:
    """Check a call to `/v1/completions` or `/v1/chat/completions`.

    Raises:
        Refusal: It is wrong; the reply says how.
    """
    body = read_json(call)
    _check_types(call, body, chat=chat)
    if body.get("model") not in models:
        raise refused(404, "Model not found")
    _check_names(call, body, chat=chat)
    nvext = body.get("nvext") or {}
    stream = bool(body.get("stream"))
    options = body.get("stream_options")
    if options is not None and not stream:
        raise bad_request(
            "Validation: The 'stream_options' field is only allowed when 'stream' is set to true."
        )
    fields = frozenset(nvext.get("extra_fields") or ())
    if "completion_token_ids" in fields and (body.get("n") or 1) != 1:
        raise bad_request(
            'Validation: `nvext.extra_fields=["completion_token_ids"]` requires exactly one '
            "generated choice"
        )
    _check_candidates(body, chat=chat)
    if nvext.get("token_data"):
        prompt = _prompt(nvext["token_data"], vocab)
    else:
        prompt = _chat(call, body, vocab) if chat else _prompt(body.get("prompt"), vocab)
    params = _as_completions(body) if chat else body
    _check_room(params.get("max_tokens"), prompt=len(prompt), room=room)
    sampling = _sampling(params, room=room - len(prompt))
    pinned = nvext.get("backend_instance_id")
    return Generate(
        prompt=prompt,
        sampling=sampling,
        stream=stream,
        include_usage=bool((options or {}).get("include_usage")),
        salt=nvext.get("cache_salt") or body.get("cache_salt"),
        fields=fields,
        decode=nvext.get("decode_worker_id", pinned),
        prefill=nvext.get("prefill_worker_id", pinned),
        chat=chat,
        ids_as_tokens=bool(body.get("return_tokens_as_token_ids")),
    )


def _check_types(call: Call, body: Mapping[str, Any], *, chat: bool) -> None:
    """Refuse what is of no type that the route takes."""
    if not chat:
        return
    if "messages" not in body:
        raise _mistyped(call, "missing field `messages`")
    messages, scored = body["messages"], body.get("logprobs")
    if isinstance(messages, str):
        raise _mistyped(call, f'invalid type: string "{messages}", expected a sequence')
    if scored is not None and not isinstance(scored, bool):
        raise _mistyped(call, f"invalid type: integer `{scored}`, expected a boolean")
    for message in messages:
        if "role" not in message:
            raise _mistyped(call, "missing field `role`")
        if message["role"] not in _ROLES:
            known = ", ".join(f"`{role}`" for role in _ROLES)
            raise _mistyped(call, f"unknown variant `{message['role']}`, expected one of {known}")


def _mistyped(call: Call, what: str) -> Exception:
    """The refusal of a body that a typed reader gave up on, which it does at its end."""
    return bad_request(f"{_DESERIALIZE}: {what} at line 1 column {len(call.body)}")


def _check_names(call: Call, body: Mapping[str, Any], *, chat: bool) -> None:
    """Refuse fields that nobody knows, and a chat without messages."""
    known = _SHARED | (_OF_CHATS if chat else _OF_COMPLETIONS)
    unknown = [name for name in body if name not in known]
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        raise bad_request(f"Validation: Unsupported parameter(s): {names}")
    for name in body.get("nvext") or {}:
        if name not in _NVEXT:
            listed = ", ".join(f"`{one}`" for one in _NVEXT)
            where = f"at line 1 column {call.body.index(name.encode()) + len(name) + 1}"
            message = f"unknown field `{name}`, expected one of {listed} {where}"
            raise bad_request(f"{_DESERIALIZE}: {message}")
    if chat and not body["messages"]:
        raise bad_request(
            "Validation: The 'messages' field cannot be empty. At least one message is required."
        )
    if body.get("tool_choice") == "required" and not body.get("tools"):
        raise bad_request('Validation: tool_choice is "required" but tools is empty')


def _chat(call: Call, body: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    """The ids that the template makes of a chat."""
    tools = () if body.get("tool_choice") == "none" else tuple(body.get("tools") or ())
    try:
        return chat_tokens(body["messages"], tools, vocab=vocab)
    except ValueError:
        content = "ChatCompletionRequestUserMessageContent"
        what = f"data did not match any variant of untagged enum {content}"
        raise _mistyped(call, what) from None


def _check_room(asked: int | None, *, prompt: int, room: int) -> None:
    """Refuse what would not fit: nothing is shortened, unless no length is asked for."""
    if prompt >= room:
        raise overlong(limit=room, actual=prompt)
    if prompt + (asked or 0) > room:
        raise overlong(limit=room, actual=prompt + (asked or 0))


def _check_candidates(body: Mapping[str, Any], *, chat: bool) -> None:
    name, most = ("top_logprobs", 20) if chat else ("logprobs", 5)
    asked = body.get(name) or 0
    if asked > most:
        raise bad_request(
            f"Validation: {name.capitalize()} must be between 0 and {most}, got {asked}"
        )


def _as_completions(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling of a chat in the words of completions."""
    tokens = body.get("max_completion_tokens")
    return {
        **body,
        "logprobs": (body.get("top_logprobs") or 0) if body.get("logprobs") else None,
        "max_tokens": body.get("max_tokens") if tokens is None else tokens,
    }


def read_inference(call: Call, *, vocab: int, room: int) -> tuple[str | None, Generate]:
    """Check a call to `/inference/v1/generate`; returns the id it names, too.

    Raises:
        Refusal: It is wrong, or wants a stream.
    """
    body = read_json(call)
    if body.get("stream"):
        raise nested(
            501,
            "streaming (stream=true) is not implemented for /inference/v1/generate yet",
            "not_implemented",
        )
    prompt = _prompt(body.get("token_ids"), vocab)
    params = body.get("sampling_params") or {}
    sampling = _sampling(params, room=room - len(prompt))
    return body.get("request_id"), Generate(prompt, sampling, salt=body.get("cache_salt"))


def _prompt(prompt: object, vocab: int) -> tuple[int, ...]:
    """The ids of a prompt, or of its text."""
    if prompt == "":
        raise bad_request("Validation: Prompt string cannot be empty")
    if isinstance(prompt, str):
        return tokens_of(prompt, vocab)
    if not isinstance(prompt, list) or not prompt:
        raise bad_request("Validation: Prompt string array cannot be empty")
    if any(type(token) is not int or not 0 <= token < vocab for token in prompt):
        raise bad_request("Invalid request")
    return tuple(prompt)


def _sampling(params: Mapping[str, Any], *, room: int) -> Sampling:
    asked = params.get("max_tokens")
    if asked is not None and asked < 1:
        raise bad_request(f"Validation: Max tokens must be greater than 0, got {asked}")
    temperature = params.get("temperature")
    if temperature is not None and not 0 <= temperature <= _MAX_TEMPERATURE:
        raise bad_request(f"Validation: Temperature must be between 0 and 2, got {temperature:g}")
    repetition = params.get("repetition_penalty") or 1.0
    if not 0 < repetition <= _MAX_REPETITION:
        raise bad_request(
            f"Validation: Repetition penalty must be between 0 and 2, got {repetition}"
        )
    ignores = bool(params.get("ignore_eos"))
    stop = params.get("stop") or ()
    return Sampling(
        max_tokens=max(1, min(room, room if asked is None else asked)),
        temperature=1.0 if temperature is None else float(temperature),
        top_p=float(params.get("top_p") or 1.0),
        top_k=max(int(params.get("top_k") or 0), 0),
        min_p=float(params.get("min_p") or 0.0),
        seed=params.get("seed"),
        # Both are dropped when the end token is to be ignored.
        stop=() if ignores else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=() if ignores else tuple(params.get("stop_token_ids") or ()),
        include_stop_str_in_output=bool(params.get("include_stop_str_in_output")),
        ignore_eos=ignores,
        min_tokens=int(params.get("min_tokens") or 0),
        logprobs=params.get("logprobs"),
        prompt_logprobs=params.get("prompt_logprobs"),
        presence_penalty=float(params.get("presence_penalty") or 0.0),
        frequency_penalty=float(params.get("frequency_penalty") or 0.0),
        repetition_penalty=float(repetition),
    )
