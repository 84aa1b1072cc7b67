"""SGLang's OpenAI routes and `/v1/tokenize`: requests turned into native ones, and replies back.

Field order and nulls are those of the recorded replies. A stream of completions has ids and names
no version; of a chat there is none with ids, and without them none is here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .calls import Call, Reply
from .sglang_shapes import BadValue, Refusal, Route, invalid, missing, plain, read_body
from .texts import chat_tokens, said, tokens_of

__all__ = ("OpenAIBody", "OpenAIStream", "answered", "read_openai", "read_tokenize", "whole")

_COMPLETIONS = Route("/v1/completions", "openai_v1_completions", 1858)
_CHAT = Route("/v1/chat/completions", "openai_v1_chat_completions", 1870)
_TOKENIZE = Route("/v1/tokenize", "openai_v1_tokenize", 1917)
_DEFAULT_MAX_TOKENS = 16
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "no_stop_trim",
    "logit_bias",
    "n",
)
"""Sampling parameters that both kinds of routes call the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIBody:
    """A request, and the native one that answers it."""

    native: Mapping[str, Any]
    chat: bool
    model: str
    tools: tuple[Mapping[str, Any], ...]
    thinks: bool
    """Whether reasoning is told apart."""
    scored: bool
    ids: bool
    prompt_ids: bool
    meta_info: bool
    ext_input: bool
    ext_output: bool
    stream: bool
    include_usage: bool


def refused(message: str, *, kind: str = "BadRequestError") -> Refusal:
    """A request that these routes refuse."""
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": 400}
    return Refusal(plain(400, body))


def read_openai(
    call: Call, *, chat: bool, vocab: int, context: int, reasoning: bool, calls: bool
) -> OpenAIBody:
    """Read a request.

    Args:
        call: What was sent.
        chat: Whether it is to the chat route.
        vocab: Ids lie below this.
        context: The longest sequence.
        reasoning: Whether the server has a parser of reasoning.
        calls: Whether it has one of tool calls.

    Raises:
        Refusal: It is wrong; the reply says how.
    """
    route = _CHAT if chat else _COMPLETIONS
    body = read_body(call, route)
    if not isinstance(body, dict):
        raise refused("the body must be an object")
    tools = tuple(body.get("tools") or ()) if body.get("tool_choice") != "none" else ()
    prompt = _chat_prompt(body, tools, vocab) if chat else _prompt(body)
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if chat and most is not None and most > context:
        raise refused(
            f"max_completion_tokens is too large: {most}."
            f"This model supports at most {context} completion tokens."
        )
    if chat and body.get("stream"):
        raise refused(
            "return_token_ids is not supported with streaming on /v1/chat/completions. "
            "Please set stream=false when using return_token_ids=true.",
            kind="BadRequest",
        )
    scored = bool(body.get("logprobs")) if chat else body.get("logprobs") is not None
    top = body.get("top_logprobs") if chat else body.get("logprobs")
    sampling = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    sampling["max_new_tokens"] = most if most is not None or chat else _DEFAULT_MAX_TOKENS
    sampling["min_new_tokens"] = body.get("min_tokens") or 0
    if body.get("seed") is not None:
        sampling["sampling_seed"] = body["seed"]
    native = {
        "rid": body.get("rid"),
        **prompt,
        "sampling_params": sampling,
        "return_logprob": scored,
        "top_logprobs_num": (top or 0) if scored else 0,
        "return_text_in_logprobs": True,
        "return_prompt_token_ids": True,
        "stream": bool(body.get("stream")),
        "extra_key": body.get("extra_key"),
        "cache_salt": body.get("cache_salt"),
        "lora_path": body.get("lora_path"),
        "routed_dp_rank": body.get("routed_dp_rank"),
    }
    ids = bool(body.get("return_token_ids"))
    return OpenAIBody(
        native={name: value for name, value in native.items() if value is not None},
        chat=chat,
        model=body.get("model") or "default",
        tools=tools if calls else (),
        thinks=chat and reasoning and body.get("separate_reasoning") is not False,
        scored=scored,
        ids=ids,
        prompt_ids=ids or bool(body.get("return_prompt_token_ids")),
        meta_info=bool(body.get("return_meta_info")),
        ext_input=bool(body.get("return_input_ids_in_sglext")),
        ext_output=bool(body.get("return_output_ids_in_sglext")),
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def read_tokenize(call: Call, *, vocab: int, context: int) -> dict[str, Any]:
    """The reply to `/v1/tokenize`.

    Raises:
        Refusal: The request is wrong.
    """
    body = read_body(call, _TOKENIZE)
    prompt = body.get("prompt") if isinstance(body, dict) else None
    messages = body.get("messages") if isinstance(body, dict) else None
    if (prompt is None) == (messages is None):
        raise refused("Exactly one of 'prompt' or 'messages' must be provided.")
    if messages is not None:
        ids = _chat_tokens(messages, tuple(body.get("tools") or ()), vocab)
    elif isinstance(prompt, str):
        ids = tokens_of(prompt, vocab)
    else:
        raise BadValue("prompt must be a string")
    return {"tokens": list(ids), "count": len(ids), "max_model_len": context}


def whole(
    body: OpenAIBody, replies: Sequence[Mapping[str, Any]], *, created: int, new_id: str
) -> dict[str, Any]:
    """The reply in one piece, of the native ones."""
    metas = [reply["meta_info"] for reply in replies]
    thought = sum(_thought(body, reply["output_ids"]) for reply in replies)
    shown: dict[str, Any] = {
        "id": metas[0]["id"],
        "object": "chat.completion" if body.chat else "text_completion",
        "created": created,
        "model": body.model,
        "choices": [_choice(body, index, one, new_id) for index, one in enumerate(replies)],
        "usage": {
            **_counts(metas),
            "prompt_tokens_details": None,
            "reasoning_tokens": thought,
            "completion_tokens_details": {"reasoning_tokens": thought} if thought else None,
        },
        "metadata": {
            "weight_version": metas[0]["weight_version"],
            "weight_versions": metas[0].get("weight_versions"),
        },
    }
    ext: dict[str, Any] = {}
    if body.ext_input:
        ext["input_ids"] = replies[0]["prompt_token_ids"]
    if body.ext_output:
        ext["output_ids"] = [reply["output_ids"] for reply in replies]
    return shown | ({"sglext": ext} if ext else {})


@dataclass(slots=True)
class OpenAIStream:
    """The chunks of one stream of completions."""

    body: OpenAIBody
    created: int
    _sent: dict[int, int] = field(default_factory=dict)
    _texts: dict[int, int] = field(default_factory=dict)
    _metas: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    def chunk(self, index: int, frame: Mapping[str, Any]) -> dict[str, Any]:
        """The chunk that a native frame becomes."""
        meta, total = frame["meta_info"], frame["meta_info"]["completion_tokens"]
        sent, first = self._sent.get(index, 0), index not in self._metas
        cumulative = len(frame["output_ids"]) == total
        ids = frame["output_ids"][sent if cumulative else 0 :]
        text = frame["text"][self._texts.get(index, 0) if cumulative else 0 :]
        scores = meta.get("output_token_logprobs")
        new = {
            "text": text,
            "output_ids": ids,
            "meta_info": {
                **meta,
                "output_token_logprobs": scores[len(scores) - len(ids) :] if scores else scores,
                "output_top_logprobs": (meta.get("output_top_logprobs") or [])[-len(ids) :]
                if ids
                else [],
            },
            "prompt_token_ids": frame.get("prompt_token_ids"),
        }
        self._sent[index] = total
        self._texts[index] = len(frame["text"]) if cumulative else 0
        self._metas[index] = meta
        choice = _choice(self.body, index, new, "")
        if not first:
            choice.pop("prompt_token_ids", None)
        return self._frame([choice], usage=None)

    def closing(self) -> dict[str, Any]:
        """The chunk that counts the tokens."""
        usage = _counts(list(self._metas.values())) | {"reasoning_tokens": 0}
        return self._frame([], usage=usage)

    def _frame(self, choices: list[dict[str, Any]], *, usage: Any) -> dict[str, Any]:
        metas = [self._metas[index] for index in sorted(self._metas)]
        return {
            "id": metas[0]["id"] if metas else None,
            "object": "text_completion",
            "created": self.created,
            "model": self.body.model,
            "choices": choices,
            "usage": usage,
        }


def _thought(body: OpenAIBody, ids: Sequence[int]) -> int:
    """How many tokens of an output are reasoning."""
    return len((said(ids, (), thinks=body.thinks, last=True).reasoning or "").split())


def _counts(metas: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    prompt = metas[0].get("prompt_tokens", 0) if metas else 0
    out = sum(meta["completion_tokens"] for meta in metas)
    return {"prompt_tokens": prompt, "total_tokens": prompt + out, "completion_tokens": out}


def _choice(body: OpenAIBody, index: int, reply: Mapping[str, Any], new_id: str) -> dict[str, Any]:
    meta, ids = reply["meta_info"], reply["output_ids"]
    finish = meta["finish_reason"] or {}
    reason = finish.get("type")
    choice: dict[str, Any] = {"index": index}
    if body.chat:
        message = said(ids, body.tools, thinks=body.thinks, last=True)
        parsed = body.thinks or message.call is not None
        shown: dict[str, Any] = {
            "role": "assistant",
            "content": (message.content or "") if parsed else reply["text"],
            "reasoning_content": message.reasoning,
        }
        if message.call is not None:
            name, arguments = message.call
            function = {"name": name, "arguments": arguments}
            one = {"id": f"call_{new_id}-{index}", "index": 0, "type": "function"}
            shown["tool_calls"] = [{**one, "function": function}]
            reason = "tool_calls" if reason == "stop" else reason
        choice["message"] = shown
        choice["logprobs"] = _chat_logprobs(meta) if body.scored else None
    else:
        choice["text"] = reply["text"]
        choice["logprobs"] = _logprobs(meta) if body.scored else None
    choice |= {"finish_reason": reason, "matched_stop": finish.get("matched")}
    if body.chat:
        if body.prompt_ids:
            choice["prompt_token_ids"] = reply["prompt_token_ids"]
        if body.ids:
            choice["response_token_ids"] = ids
        if body.meta_info:
            choice["meta_info"] = meta
    elif body.ids:
        choice |= {"token_ids": ids, "prompt_token_ids": reply["prompt_token_ids"]}
    return choice


def _logprobs(meta: Mapping[str, Any]) -> dict[str, Any]:
    entries = meta.get("output_token_logprobs") or []
    return {
        "text_offset": [-1] * len(entries),
        "token_logprobs": [entry[0] for entry in entries],
        "tokens": [entry[2] for entry in entries],
        "top_logprobs": [
            {entry[2]: entry[0] for entry in listed or []}
            for listed in meta.get("output_top_logprobs") or []
        ],
    }


def _chat_logprobs(meta: Mapping[str, Any]) -> dict[str, Any]:
    entries = meta.get("output_token_logprobs") or []
    tops = meta.get("output_top_logprobs") or [[] for _ in entries]
    return {
        "content": [
            {**_scored(entry), "top_logprobs": [_scored(one) for one in listed or []]}
            for entry, listed in zip(entries, tops, strict=True)
        ]
    }


def _scored(entry: Sequence[Any]) -> dict[str, Any]:
    return {"token": entry[2], "bytes": list(entry[2].encode()), "logprob": entry[0]}


def _prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    prompt = body.get("prompt")
    if prompt is None:
        raise invalid(_COMPLETIONS, missing("prompt", body))
    return {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}


def _chat_prompt(
    body: Mapping[str, Any], tools: tuple[Mapping[str, Any], ...], vocab: int
) -> dict[str, Any]:
    if "messages" not in body:
        raise invalid(_CHAT, missing("messages", {**body, "tool_choice": "none"}))
    if body.get("input_ids") is not None:
        return {"input_ids": body["input_ids"]}
    return {"input_ids": list(_chat_tokens(body["messages"], tools, vocab))}


def _chat_tokens(
    messages: Any, tools: tuple[Mapping[str, Any], ...], vocab: int
) -> tuple[int, ...]:
    if not messages:
        raise refused("Messages cannot be empty.")
    try:
        return chat_tokens(messages, tools, vocab=vocab)
    except ValueError as error:
        raise refused(str(error)) from error


def answered(refusal: BadValue) -> Reply:
    """A value that the front end refuses, as these routes say it."""
    return refused(refusal.message).reply
