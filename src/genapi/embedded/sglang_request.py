"""SGLang's reading of a `/generate` request.

It is read in three places: by validation and the schema gate before anything else, by the front
end only once the request is past the pause gate, and by the scheduler, whose refusal is a finish
reason. Unknown fields at the top are ignored without a word; unknown sampling parameters are not.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .calls import Call
from .sampling import GREEDY, Sampling
from .sglang_shapes import (
    BadValue,
    Route,
    broken_contract,
    generation_fields,
    read_body,
)
from .texts import tokens_of

__all__ = ("Item", "Limits", "checked", "items_of", "read_generate", "rejection", "tokens_of")

_ROUTE = Route("/generate", "generate_request", 928)
_DEFAULT_MAX_NEW_TOKENS = 128
_DEFAULT_SEED = 42
_NO_TOP_K = 1 << 30
_EPSILON = 1e-6
_MARGIN = 6
"""A prompt has to leave this much of the context free."""
_PARAMS: Mapping[str, str] = {
    "max_new_tokens": "i64",
    "stop": "texts",
    "stop_token_ids": "i64s",
    "stop_regex": "texts",
    "temperature": "f64",
    "top_p": "f64",
    "top_k": "i64",
    "min_p": "f64",
    "frequency_penalty": "f64",
    "presence_penalty": "f64",
    "repetition_penalty": "f64",
    "min_new_tokens": "i64",
    "n": "i64",
    "json_schema": "a string",
    "regex": "a string",
    "ebnf": "a string",
    "structural_tag": "a string",
    "ignore_eos": "a boolean",
    "skip_special_tokens": "a boolean",
    "spaces_between_special_tokens": "a boolean",
    "no_stop_trim": "a boolean",
    "stream_interval": "i64",
    "logit_bias": "a map",
    "sampling_seed": "i64",
    "custom_params": "any",
    "beam_width": "i64",
    "watermark": "any",
    "choice": "texts",
}
_SCHEMA: Mapping[str, tuple[tuple[type, ...], str]] = {
    "i64": ((int,), "i64"),
    "i64s": ((list,), "a sequence"),
    "f64": ((int, float), "f64"),
    "a boolean": ((bool,), "a boolean"),
    "a string": ((str,), "a string"),
    "a map": ((dict,), "a map"),
    "texts": ((str, list), "a value or an array of values for StringOrList"),
    "any": ((bool, int, float, str, list, dict), "anything"),
}
"""Types of a kind, and how the schema gate calls it."""

_MAX_PENALTY = 2.0
_RULES: Mapping[str, tuple[float, Callable[[float], bool], str]] = {
    "top_p": (1.0, lambda value: 0 < value <= 1, "must be in (0, 1]"),
    "min_p": (0.0, lambda value: 0 <= value <= 1, "must be in [0, 1]"),
    "frequency_penalty": (0.0, lambda value: abs(value) <= _MAX_PENALTY, "must be in [-2, 2]"),
    "presence_penalty": (0.0, lambda value: abs(value) <= _MAX_PENALTY, "must be in [-2, 2]"),
    "repetition_penalty": (
        1.0,
        lambda value: 0 < value <= _MAX_PENALTY,
        "must be in (0, 2] (1.0 = no penalty)",
    ),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is checked against."""

    vocab: int
    context: int
    seeded: bool
    """Whether seeds mean anything; without deterministic inference SGLang ignores them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One sequence that is asked for."""

    rid: str
    token_ids: tuple[int, ...]
    params: Mapping[str, Any]
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] | None = None
    text_in_logprobs: bool = False
    prompt_token_ids: bool = False
    sampling_mask: bool = False
    salt: str | None = None
    lora: str | None = None
    hidden_states: bool = False

    @property
    def trims_stop(self) -> bool:
        """Whether what matched is taken off the text."""
        return not self.params.get("no_stop_trim")


def read_generate(call: Call) -> dict[str, Any]:
    """The body of a request that validation and the schema gate let through.

    Raises:
        Refusal: They do not.
    """
    body = generation_fields(_ROUTE, read_body(call, _ROUTE))
    params = body.get("sampling_params")
    for one in params if isinstance(params, list) else [] if params is None else [params]:
        if not isinstance(one, dict):
            expected = "a value or an array of values for SamplingParamsOrList"
            raise broken_contract(f"invalid type: {_serde(one)}, expected {expected}")
        for name, value in one.items():
            if name not in _PARAMS:
                known = ", ".join(f"`{known}`" for known in _PARAMS)
                raise broken_contract(f"unknown field `{name}`, expected one of {known}")
            if value is not None:
                _conform(_PARAMS[name], value)
    return body


def items_of(
    body: Mapping[str, Any], *, vocab: int, new_id: Callable[[], str]
) -> tuple[list[Item], bool, int]:
    """The sequences of a request, whether it is a single one, and how many samples of each.

    Raises:
        Refusal: They do not add up.
    """
    prompts, single = _prompts(body, vocab)
    params = body.get("sampling_params") or {}
    n = _samples(params)
    if n > 1:
        single = False
    size = len(prompts)
    rids = _rids(body.get("rid"), size=size, single=single, new_id=new_id)
    listed = _Lists(body, size=size, single=single, n=n)
    items = [
        Item(
            rid=rids[index],
            token_ids=prompt,
            params=(params[index] if isinstance(params, list) else params) or {},
            stream=bool(body.get("stream")),
            return_logprob=bool(listed.one("return_logprob", index, default=False)),
            logprob_start_len=listed.one("logprob_start_len", index, default=-1),
            top_logprobs_num=listed.one("top_logprobs_num", index, default=0),
            token_ids_logprob=listed.ids("token_ids_logprob", index),
            text_in_logprobs=bool(body.get("return_text_in_logprobs")),
            prompt_token_ids=bool(body.get("return_prompt_token_ids")),
            sampling_mask=bool(listed.one("return_sampling_mask", index, default=False)),
            salt=_salt(listed.one("cache_salt", index), listed.one("extra_key", index)),
            lora=listed.one("lora_path", index),
            hidden_states=bool(listed.one("return_hidden_states", index, default=False)),
        )
        for index, prompt in enumerate(prompts)
    ]
    if len(set(rids)) != len(rids):
        twice = [rid for rid in dict.fromkeys(rids) if rids.count(rid) > 1]
        raise BadValue(f"Duplicate request IDs detected within the request: {twice}")
    return items, single, n


def checked(item: Item, limits: Limits) -> Sampling:
    """What the front end makes of an item once it is past the gate.

    Raises:
        Refusal: A value that it refuses.
    """
    params, length = item.params, len(item.token_ids)
    if item.lora is not None:
        raise BadValue(
            f"LoRA adapter '{item.lora}' was requested, but LoRA is not enabled. Please launch the "
            "server with --enable-lora flag and preload adapters using --lora-paths or "
            "/load_lora_adapter endpoint."
        )
    _check_length(length, params.get("max_new_tokens"), limits.context)
    for token in item.token_ids_logprob or ():
        if not 0 <= token < limits.vocab:
            raise BadValue(
                f"token_ids_logprob contains out-of-vocabulary token id {token}; valid range is "
                f"[0, {limits.vocab})."
            )
    if item.hidden_states:
        raise BadValue(
            "The server is not configured to return hidden states. Please set "
            "`--return-hidden-states-mode last`, `--return-hidden-states-mode full`, or the legacy "
            "`--enable-return-hidden-states` flag."
        )
    values = _verified(params, limits.vocab)
    temperature, top_k = values["temperature"], int(values["top_k"])
    if temperature < _EPSILON:
        temperature, top_k = 0.0, 1
    else:
        temperature = max(temperature, GREEDY)
    asked = params.get("max_new_tokens", _DEFAULT_MAX_NEW_TOKENS)
    room = max(limits.context - 2 - length, 0)
    scored = item.return_logprob and 0 <= item.logprob_start_len < length
    seed = params.get("sampling_seed")
    return Sampling(
        max_tokens=room if asked is None else min(asked, room),
        temperature=temperature,
        top_p=values["top_p"],
        top_k=0 if top_k >= _NO_TOP_K else top_k,
        min_p=values["min_p"],
        seed=(_DEFAULT_SEED if seed is None else seed) if limits.seeded else None,
        stop=_texts(params.get("stop")),
        # who goes on past the end token goes on past every other
        stop_token_ids=()
        if params.get("ignore_eos")
        else tuple(params.get("stop_token_ids") or ()),
        ignore_eos=bool(params.get("ignore_eos")),
        min_tokens=int(values["min_new_tokens"]),
        logprobs=item.top_logprobs_num if item.return_logprob else None,
        prompt_logprobs=item.top_logprobs_num if scored else None,
        prompt_start=max(item.logprob_start_len, 0),
        logprob_token_ids=item.token_ids_logprob or (),
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
        repetition_penalty=values["repetition_penalty"],
        logit_bias=tuple((int(t), float(b)) for t, b in (params.get("logit_bias") or {}).items()),
        keeps_support=item.sampling_mask,
    )


def rejection(item: Item, limits: Limits) -> str | None:
    """Why the scheduler ends a request that the front end let through, or None."""
    length, most = len(item.token_ids), limits.context - _MARGIN
    if length >= most:
        return (
            f"Input length ({length} tokens) exceeds the maximum allowed length ({most} tokens). "
            "Use a shorter input or enable --allow-auto-truncate."
        )
    if item.return_logprob and item.logprob_start_len > length:
        return (
            f"req.logprob_start_len={item.logprob_start_len} is higher than the number of input "
            f"tokens len(req.origin_input_ids)={length}. Please use a smaller logprob_start_len."
        )
    return None


class _Lists:
    """Fields that are one value, or in a batch a list with one for each item."""

    def __init__(self, body: Mapping[str, Any], *, size: int, single: bool, n: int) -> None:
        self._body = body
        self._size = size
        self._single = single
        self._n = n

    def one(self, name: str, index: int, *, default: Any = None) -> Any:
        value = self._body.get(name)
        if isinstance(value, list) and not self._single:
            if self._n > 1:
                raise BadValue(f"Cannot use list {name} with parallel_sample_num > 1")
            value = value[index] if index < len(value) else None
        return default if value is None else value

    def ids(self, name: str, index: int) -> tuple[int, ...] | None:
        value = self._body.get(name) or None
        if value is not None and isinstance(value[0], list):
            if self._single:
                raise BadValue(f"{name} must be a flat list of integers.")
            value = value[index] or None
        return None if value is None else tuple(value)


def _prompts(body: Mapping[str, Any], vocab: int) -> tuple[list[tuple[int, ...]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        if body.get("input_embeds") is not None:
            raise BadValue("input_embeds: the embedded engine takes input_ids or text only")
        raise BadValue("Either text, input_ids or input_embeds should be provided.")
    if ids is None:
        if isinstance(text, str):
            return [tokens_of(text, vocab)], True
        return [tokens_of(one, vocab) for one in text or ()], False
    if not ids:
        raise BadValue("input_ids cannot be empty.")
    if isinstance(ids[0], list):
        return [tuple(row) for row in ids], False
    return [tuple(ids)], True


def _samples(params: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> int:
    if isinstance(params, Mapping):
        return int(params.get("n") or 1)
    counts = {int(one.get("n") or 1) for one in params}
    if len(counts) > 1:
        raise BadValue(
            "The parallel_sample_num should be the same for all samples in sample params."
        )
    return counts.pop() if counts else 1


def _rids(
    rid: str | list[str] | None, *, size: int, single: bool, new_id: Callable[[], str]
) -> list[str]:
    if rid is None:
        return [new_id() for _ in range(size)]
    if isinstance(rid, str):
        return [rid] if single else [f"{rid}_{index}" for index in range(size)]
    if len(rid) != size:
        raise BadValue(
            "The specified rids length mismatch with the batch_size for batch processing."
        )
    return rid


def _salt(cache_salt: str | None, extra_key: str | None) -> str | None:
    """What tells this request's prefixes from others."""
    return f"{cache_salt or ''}\0{extra_key or ''}" if cache_salt or extra_key else None


def _check_length(length: int, max_new_tokens: int | None, context: int) -> None:
    if length >= context:
        raise BadValue(
            f"The input ({length} tokens) is longer than the model's context length "
            f"({context} tokens)."
        )
    if max_new_tokens is not None and max_new_tokens + length > context:
        raise BadValue(
            f"Requested token count exceeds the model's maximum context length of {context} "
            f"tokens. You requested a total of {max_new_tokens + length} tokens: {length} tokens "
            f"from the input messages and {max_new_tokens} tokens for the completion. Please "
            "reduce the number of tokens in the input messages or the completion to fit within "
            "the limit."
        )


def _verified(params: Mapping[str, Any], vocab: int) -> dict[str, float]:
    temperature = _or(params.get("temperature"), 1.0)
    if not math.isfinite(temperature) or temperature < 0:
        raise BadValue(f"temperature must be a non-negative finite number, got {temperature}.")
    values: dict[str, float] = {"temperature": temperature}
    for name, (default, holds, rule) in _RULES.items():
        values[name] = value = _or(params.get(name), default)
        if not holds(value):
            raise BadValue(f"{name} {rule}, got {value}.")
    top_k = int(_or(params.get("top_k"), -1))
    if top_k == -1:
        top_k = _NO_TOP_K
    if top_k < 1 and temperature >= _EPSILON:
        raise BadValue(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    for token in params.get("logit_bias") or {}:
        if not 0 <= int(token) < vocab:
            raise BadValue(f"logit_bias must has keys in [0, {vocab - 1}], got {token}.")
    return values | {"top_k": top_k, "min_new_tokens": _verified_lengths(params)}


def _verified_lengths(params: Mapping[str, Any]) -> int:
    """The least number of new tokens, which has to go with the most.

    Raises:
        Refusal: It does not.
    """
    least = int(_or(params.get("min_new_tokens"), 0))
    most = params.get("max_new_tokens", _DEFAULT_MAX_NEW_TOKENS)
    if least < 0:
        raise BadValue(f"min_new_tokens must be in [0, max_new_tokens], got {least}.")
    if most is not None and most < 0:
        raise BadValue(f"max_new_tokens must be at least 0, got {most}.")
    if most is not None and least > most:
        raise BadValue(f"min_new_tokens must be in [0, max_new_tokens({most})], got {least}.")
    return least


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _texts(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _conform(kind: str, value: object) -> None:
    """Refuse a value that the schema gate does not take for its parameter."""
    types, expected = _SCHEMA[kind]
    if type(value) not in types:
        raise broken_contract(f"invalid type: {_serde(value)}, expected {expected}")
    if kind == "i64s" and isinstance(value, list):
        for one in value:
            _conform("i64", one)


def _serde(value: object) -> str:
    """How the schema gate names a value."""
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{value}`"
        case float():
            return f"floating point `{value}`"
        case str():
            return f'string "{value}"'
        case list():
            return "sequence"
        case _:
            return "map"
