"""vLLM's OpenAI routes, and those that make ids of a chat and sense of a reply.

Field order, nulls and number formats are those of the recorded replies. They never name a weight
version. Several prompts in one request and `echo` are not there.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .calls import Call
from .engine import Engine, EngineDeadError
from .requests import Request, Track, text_of
from .sampling import Sampling, Score
from .texts import Said, chat_tokens, said, tokens_of
from .vllm_reply import ENGINE_DEAD, MASKED, event, prompt_logprobs, usage_of
from .vllm_request import check_model, read_salt, read_sampling, read_stream_options
from .vllm_shapes import bad_request, error_body, invalid, json_object

__all__ = ("OpenAIBody", "OpenAIRenderer", "derendered", "read_openai", "read_tokenize", "rendered")

_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIBody:
    """A checked request."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    chat: bool
    tools: tuple[Mapping[str, Any], ...]
    request_id: str | None
    return_token_ids: bool
    ids_as_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    salt: str | None


def read_openai(call: Call, engine: Engine, *, models: Iterable[str], chat: bool) -> OpenAIBody:
    """Check a request the way vLLM does.

    Raises:
        Refusal: It is wrong; the reply says how.
    """
    body = json_object(call)
    check_model(body, models)
    config = engine.config
    tools = tuple(body.get("tools") or ()) if body.get("tool_choice") != "none" else ()
    ids = _chat(body, tools, config.vocab) if chat else _prompt(body, config.vocab)
    if max(ids) >= config.vocab:
        raise bad_request(f"Token id {max(ids)} is out of vocabulary")
    if len(ids) > config.max_model_len:
        raise bad_request(
            f"This model's maximum context length is {config.max_model_len} tokens. However, your "
            f"prompt contains {len(ids)} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={len(ids)})",
            param="input_tokens",
        )
    params = dict(body)
    if chat:
        scored = params.get("logprobs")
        params["logprobs"] = (params.get("top_logprobs") or 0) if scored else None
        params["max_tokens"] = params.get("max_completion_tokens") or params.get("max_tokens")
    elif params.get("max_tokens") is None:
        params["max_tokens"] = _DEFAULT_MAX_TOKENS
    options = read_stream_options(body)
    return OpenAIBody(
        token_ids=ids,
        sampling=read_sampling(params, vocab=config.vocab, room=config.max_model_len - len(ids)),
        chat=chat,
        tools=tools,
        request_id=body.get("request_id"),
        return_token_ids=bool(body.get("return_token_ids")),
        ids_as_tokens=bool(body.get("return_tokens_as_token_ids")),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        salt=read_salt(body),
    )


def read_tokenize(call: Call, engine: Engine, *, models: Iterable[str]) -> dict[str, Any]:
    """The reply to `/tokenize`.

    Raises:
        Refusal: The request is wrong.
    """
    body = json_object(call)
    check_model(body, models)
    config = engine.config
    if "messages" in body:
        ids = _chat(body, tuple(body.get("tools") or ()), config.vocab)
    elif isinstance(body.get("prompt"), str):
        ids = tokens_of(body["prompt"], config.vocab)
    else:
        raise invalid("missing", "body.prompt", "Field required", got=body)
    strings = [text_of([token]) for token in ids] if body.get("return_token_strs") else None
    return {
        "count": len(ids),
        "max_model_len": config.max_model_len,
        "tokens": list(ids),
        "token_strs": strings,
    }


def rendered(body: OpenAIBody, *, request_id: str, thinks: bool) -> dict[str, Any]:
    """The reply to a request to render: what the native route would be asked."""
    sampling = body.sampling
    return {
        "request_id": request_id,
        "token_ids": list(body.token_ids),
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": {
            "n": sampling.n,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "skip_special_tokens": not (thinks or body.tools),
            "structured_outputs": None,
        },
        "model": None,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": {"chat_template_kwargs": {}} if thinks else None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": body.stream,
        "stream_options": None,
        "cache_salt": body.salt,
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def derendered(
    call: Call, *, model: str, created: int, thinks: bool, new_id: str
) -> dict[str, Any]:
    """The reply to a request to make a chat completion of generated ids.

    Raises:
        Refusal: The request is wrong.
    """
    body = json_object(call)
    generated, chat = body.get("generate_response"), body.get("chat_request")
    if not isinstance(generated, dict) or not isinstance(generated.get("choices"), list):
        raise invalid("missing", "body.generate_response", "Field required", got=body)
    if thinks and not isinstance(chat, dict):
        raise bad_request(
            "chat_request is required when a tool or reasoning parser is configured because plain "
            "detokenization would leak raw parser markup into content."
        )
    tools = tuple((chat or {}).get("tools") or ())
    choices, count = [], 0
    for choice in generated["choices"]:
        ids = choice.get("token_ids") or []
        count += len(ids)
        message = said(ids, tools, thinks=thinks, last=True)
        choices.append(
            {
                "index": choice.get("index", 0),
                "message": _message(message, f"{new_id}-{choice.get('index', 0)}"),
                "logprobs": None,
                "finish_reason": choice.get("finish_reason"),
                "stop_reason": choice.get("stop_reason"),
                "token_ids": None,
                "routed_experts": None,
            }
        )
    prompt = body.get("prompt_tokens") or 0
    return {
        "id": generated.get("request_id"),
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": prompt,
            "total_tokens": prompt + count,
            "completion_tokens": count,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRenderer:
    """How one request's outputs are put into replies."""

    body: OpenAIBody
    request: Request
    reply_id: str
    model: str
    created: int
    fingerprint: str
    show_cached: bool
    thinks: bool
    """Whether reasoning is told apart."""

    def whole(self) -> dict[str, Any]:
        """The reply of a finished request."""
        body, request = self.body, self.request
        details = None
        if self.show_cached:
            created = 0 if body.chat else None
            details = {
                "cached_tokens": request.cached_tokens,
                "created_cache_tokens": created,
                "multimodal_tokens": None,
            }
        usage = usage_of(request)
        reply: dict[str, Any] = {
            "id": self.reply_id,
            "object": "chat.completion" if body.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._choice(track) for track in request.tracks],
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": usage | {"prompt_tokens_details": details, "completion_tokens_details": None},
        }
        if body.chat:
            reply |= {
                "prompt_logprobs": prompt_logprobs(request),
                "prompt_token_ids": self._prompt(),
                "prompt_text": None,
            }
        return reply | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events; steps merge when the reader is slow."""
        tracks = self.request.tracks
        sent, closed = [0] * len(tracks), [False] * len(tracks)
        try:
            if self.body.chat:
                await self.request.changed()
                for track in tracks:
                    yield event(self._opening(track))
            while not all(closed):
                await self.request.changed()
                for track in tracks:
                    start, last = sent[track.index], track.finish_reason is not None
                    if closed[track.index] or (start == len(track.output) and not last):
                        continue
                    sent[track.index], closed[track.index] = len(track.output), last
                    # of an output that was aborted without a token nothing is said
                    if track.output or track.finish_reason != "abort":
                        yield event(self._chunk(track, start, last=last))
        except EngineDeadError:
            yield event(error_body(500, ENGINE_DEAD, "InternalServerError"))
        else:
            if self.body.include_usage:
                yield event(self._closing())
        yield b"data: [DONE]\n\n"

    def _choice(self, track: Track) -> dict[str, Any]:
        body = self.body
        choice: dict[str, Any] = {"index": track.index}
        finish: str | None = track.finish_reason
        if body.chat:
            message = self._said(track, len(track.output))
            finish = "tool_calls" if message.call and finish == "stop" else finish
            choice["message"] = _message(message, self._call_id(track))
        else:
            choice["text"] = self._text(track, len(track.output))
        choice |= {
            "logprobs": self._logprobs(track, 0),
            "finish_reason": finish,
            "stop_reason": track.stop_reason,
            "token_ids": list(track.output) if body.return_token_ids else None,
        }
        if not body.chat:
            choice |= {
                "prompt_logprobs": prompt_logprobs(self.request),
                "prompt_token_ids": self._prompt(),
            }
        return choice | {"routed_experts": None}

    def _opening(self, track: Track) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": track.index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._frame([choice], generated=0)
        if self.body.return_token_ids:
            chunk |= {"prompt_token_ids": self._prompt(), "prompt_text": None}
        return chunk

    def _chunk(self, track: Track, start: int, *, last: bool) -> dict[str, Any]:
        body = self.body
        choice: dict[str, Any] = {"index": track.index}
        finish = track.finish_reason if last else None
        if body.chat:
            delta = self._delta(track, start)
            if finish == "stop" and self._said(track, len(track.output)).call:
                finish = "tool_calls"
            choice["delta"] = delta
        else:
            whole, before = self._text(track, len(track.output)), self._text(track, start)
            choice["text"] = whole[len(before) :]
        choice |= {"logprobs": self._logprobs(track, start), "finish_reason": finish}
        if last or not body.chat:
            choice["stop_reason"] = track.stop_reason if last else None
        if body.return_token_ids:
            if not body.chat:
                choice["prompt_token_ids"] = self._prompt() if start == 0 else None
            choice["token_ids"] = track.output[start:]
        return self._frame([choice], generated=len(track.output))

    def _closing(self) -> dict[str, Any]:
        usage: dict[str, Any] = usage_of(self.request)
        if self.show_cached:
            cached = {"cached_tokens": self.request.cached_tokens}
            usage["prompt_tokens_details"] = cached | (
                {"created_cache_tokens": 0} if self.body.chat else {}
            )
        return self._frame([], usage=usage) | {"system_fingerprint": self.fingerprint}

    def _frame(
        self,
        choices: list[dict[str, Any]],
        *,
        generated: int = 0,
        usage: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": self.reply_id,
            "object": "chat.completion.chunk" if self.body.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if choices and self.body.continuous_usage:
            prompt = len(self.request.prompt)
            usage = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + generated,
                "completion_tokens": generated,
                **({"completion_tokens_details": None} if self.body.chat else {}),
            }
        return chunk if usage is None else chunk | {"usage": usage}

    def _prompt(self) -> list[int] | None:
        return list(self.request.prompt) if self.body.return_token_ids else None

    def _call_id(self, track: Track) -> str:
        return f"{self.reply_id}-{track.index}"

    def _text(self, track: Track, end: int) -> str:
        text = text_of(track.output[:end])
        if isinstance(track.stop_reason, str) and track.stop_reason in text:
            stop = text.index(track.stop_reason)
            if self.request.sampling.include_stop_str_in_output:
                stop += len(track.stop_reason)
            text = text[:stop]
        return text

    def _said(self, track: Track, end: int) -> Said:
        last = end == len(track.output) and track.finish_reason is not None
        if not self.thinks and not self.body.tools:
            return Said(self._text(track, end))
        return said(track.output[:end], self.body.tools, thinks=self.thinks, last=last)

    def _delta(self, track: Track, start: int) -> dict[str, Any]:
        before, now = self._said(track, start), self._said(track, len(track.output))
        if start == 0:
            before = Said(None)
        delta: dict[str, Any] = {}
        content = (now.content or "")[len(before.content or "") :]
        thought = (now.reasoning or "")[len(before.reasoning or "") :]
        if thought:
            delta["reasoning"] = thought
        if content or not (thought or now.call):
            delta["content"] = content
        if now.call is not None:
            name, arguments = now.call
            function: dict[str, Any] = {
                "arguments": arguments[len(before.call[1]) if before.call else 0 :]
            }
            piece: dict[str, Any] = {"index": 0, "function": function}
            if before.call is None:
                function["name"] = name
                piece |= {"id": self._call_id(track), "type": "function"}
            delta["tool_calls"] = [piece]
        return delta

    def _logprobs(self, track: Track, start: int) -> dict[str, Any] | None:
        most = self.request.sampling.logprobs
        if most is None:
            return None
        scores = track.scores[start:]
        if self.body.chat:
            return {"content": [self._entry(one, most) for one in scores]}
        tokens = [self._name(one[0]) for one in scores]
        offset, offsets = len(self._text(track, start)), []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(one[0].logprob, MASKED) for one in scores],
            "tokens": tokens,
            "top_logprobs": [
                {self._name(score): max(score.logprob, MASKED) for score in one[: max(most, 1)]}
                for one in scores
            ],
        }

    def _entry(self, scores: tuple[Score, ...], most: int) -> dict[str, Any]:
        listed = [self._scored(score) for score in scores[:most]]
        return self._scored(scores[0]) | {"top_logprobs": listed}

    def _scored(self, score: Score) -> dict[str, Any]:
        text = text_of([score.token_id])
        return {
            "token": self._name(score),
            "logprob": max(score.logprob, MASKED),
            "bytes": list(text.encode()),
        }

    def _name(self, score: Score) -> str:
        token = score.token_id
        return f"token_id:{token}" if self.body.ids_as_tokens else text_of([token])


def _message(message: Said, call_id: str) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "role": "assistant",
        "content": message.content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if message.call is not None:
        name, arguments = message.call
        function = {"name": name, "arguments": arguments}
        shown["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
    return shown | {"reasoning": message.reasoning}


def _chat(
    body: Mapping[str, Any], tools: tuple[Mapping[str, Any], ...], vocab: int
) -> tuple[int, ...]:
    messages = body.get("messages")
    if "messages" not in body:
        raise invalid("missing", "body.messages", "Field required", got=body)
    if not isinstance(messages, list) or not messages:
        raise invalid("list_type", "body.messages", "Input should be a valid list", got=messages)
    try:
        return chat_tokens(messages, tools, vocab=vocab)
    except ValueError as error:
        raise bad_request(str(error)) from error


def _prompt(body: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return tokens_of(prompt, vocab)
    if not isinstance(prompt, list) or not prompt or not all(type(t) is int for t in prompt):
        text = "the embedded engine takes one prompt: a text, or a list of ids"
        raise invalid("list_type", "body.prompt", text, got=prompt)
    return tuple(prompt)
