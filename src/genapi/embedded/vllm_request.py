"""vLLM's reading of a `/inference/v1/generate` request.

Unknown fields are ignored without a word, as vLLM does; known ones are checked in about the order
in which vLLM checks them, with its words.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from .calls import Call
from .engine import Engine
from .sampling import GREEDY, Sampling
from .vllm_shapes import bad_request, invalid, json_object

__all__ = (
    "GenerateBody",
    "check_model",
    "read_generate",
    "read_salt",
    "read_sampling",
    "read_stream_options",
)

_MAX_LOGPROBS = 20
_MAX_SALT = 1024
_MIN_TEMPERATURE = 0.01
"""Smaller ones that are not greedy are raised to this."""
_RANGES: Mapping[str, tuple[float, Callable[[float], bool], str]] = {
    "temperature": (1.0, lambda value: value >= 0, "must be non-negative"),
    "top_p": (1.0, lambda value: 0 < value <= 1, "must be in (0, 1]"),
    "min_p": (0.0, lambda value: 0 <= value <= 1, "must be in [0, 1]"),
    "presence_penalty": (0.0, lambda value: abs(value) <= _MAX_PENALTY, "must be in [-2, 2]"),
    "frequency_penalty": (0.0, lambda value: abs(value) <= _MAX_PENALTY, "must be in [-2, 2]"),
    "repetition_penalty": (1.0, lambda value: value > 0, "must be greater than zero"),
    "n": (1, lambda value: value >= 1, "must be at least 1"),
    "top_k": (0, lambda value: value >= -1, "must be 0 (disable), or at least 1"),
    "min_tokens": (0, lambda value: value >= 0, "must be greater than or equal to 0"),
}
_MAX_PENALTY = 2.0


@dataclass(frozen=True, slots=True)
class GenerateBody:
    """A checked request."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    request_id: str | None
    return_token_ids: bool
    text: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    salt: str | None


def read_generate(call: Call, engine: Engine, *, models: Iterable[str]) -> GenerateBody:
    """Check a request the way vLLM does.

    Raises:
        Refusal: It is wrong; the reply says how.
    """
    body = json_object(call)
    ids = _token_ids(body)
    params = body.get("sampling_params")
    if "sampling_params" not in body:
        raise invalid("missing", "body.sampling_params", "Field required", got=body)
    if not isinstance(params, dict):
        raise invalid(
            "dict_type", "body.sampling_params", "Input should be a valid dictionary", got=params
        )
    salt = read_salt(body)
    mode = body.get("output_mode", "tokens")
    if mode not in ("tokens", "text"):
        raise invalid(
            "literal_error", "body.output_mode", "Input should be 'tokens' or 'text'", got=mode
        )
    check_model(body, models)
    config = engine.config
    if max(ids) >= config.vocab:
        raise bad_request(f"Token id {max(ids)} is out of vocabulary")
    sampling = read_sampling(params, vocab=config.vocab, room=config.max_model_len - len(ids))
    _check_length(len(ids), config.max_model_len)
    options = read_stream_options(body)
    return GenerateBody(
        token_ids=ids,
        sampling=sampling,
        request_id=body.get("request_id"),
        return_token_ids=bool(body.get("return_token_ids")),
        text=mode == "text",
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(
            options.get("include_usage") and options.get("continuous_usage_stats")
        ),
        salt=salt,
    )


def check_model(body: Mapping[str, Any], models: Iterable[str]) -> None:
    """Check the name of the model, where there is one.

    Raises:
        Refusal: Nothing is served under it.
    """
    model, names = body.get("model"), list(models)
    if model is not None and model not in names:
        raise bad_request(
            f"The model `{model}` does not exist. Valid aliases: {', '.join(names)}.",
            param="model",
            kind="NotFoundError",
            status=404,
        )


def read_salt(body: Mapping[str, Any]) -> str | None:
    """The salt of the prefix cache.

    Raises:
        Refusal: It is none.
    """
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= _MAX_SALT):
        raise invalid("string_type", "body.cache_salt", "Input should be a valid string", got=salt)
    return salt


def read_stream_options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a stream is asked for besides its tokens.

    Raises:
        Refusal: It is no object.
    """
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        loc = "body.stream_options"
        raise invalid("dict_type", loc, "Input should be a valid dictionary", got=options)
    return options


def read_sampling(params: Mapping[str, Any], *, vocab: int, room: int) -> Sampling:
    """Check sampling parameters; `room` is how many tokens fit after the prompt.

    Raises:
        Refusal: A value that vLLM refuses.
    """
    fields = _Fields(params)
    n, temperature = fields.integer("n"), fields.number("temperature")
    if n > 1 and temperature < GREEDY:
        raise bad_request(f"n must be 1 when using greedy sampling, got {n}.")
    if temperature >= GREEDY:
        temperature = max(temperature, _MIN_TEMPERATURE)
    asked = fields.optional_integer("max_tokens")
    if asked is not None and asked < 1:
        _refuse("max_tokens", asked, f"max_tokens must be at least 1, got {asked}.")
    min_tokens = fields.integer("min_tokens")
    if asked is not None and min_tokens > asked:
        text = f"min_tokens must be less than or equal to max_tokens={asked}, got {min_tokens}."
        _refuse("min_tokens", min_tokens, text)
    allowed = params.get("allowed_token_ids")
    if allowed is not None:
        if not allowed:
            _refuse("allowed_token_ids", allowed, "allowed_token_ids is not None and empty!")
        allowed = _vocabulary("allowed_token_ids", fields.integers("allowed_token_ids"), vocab)
    stop_ids = _vocabulary("stop_token_ids", fields.integers("stop_token_ids"), vocab)
    bias = fields.biases("logit_bias")
    _vocabulary("logit_bias", bias, vocab)
    return Sampling(
        max_tokens=max(1, room if asked is None else min(room, asked)),
        n=n,
        temperature=temperature,
        top_p=fields.number("top_p"),
        top_k=max(fields.integer("top_k"), 0),
        min_p=fields.number("min_p"),
        seed=fields.optional_integer("seed"),
        stop=fields.strings("stop"),
        stop_token_ids=stop_ids,
        include_stop_str_in_output=bool(params.get("include_stop_str_in_output")),
        ignore_eos=bool(params.get("ignore_eos")),
        min_tokens=min_tokens,
        logprobs=_top("logprobs", "sample", fields, vocab=vocab),
        prompt_logprobs=_top("prompt_logprobs", "prompt", fields, vocab=vocab),
        presence_penalty=fields.number("presence_penalty"),
        frequency_penalty=fields.number("frequency_penalty"),
        repetition_penalty=fields.number("repetition_penalty"),
        bad_words=tuple(_word(word, vocab) for word in fields.strings("bad_words")),
        allowed_token_ids=allowed,
        logit_bias=tuple(bias.items()),
        skip_reading_prefix_cache=params.get("skip_reading_prefix_cache"),
    )


class _Fields:
    """Typed reads of sampling parameters."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._params = params

    def optional_integer(self, name: str) -> int | None:
        value = self._params.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            loc = f"body.sampling_params.{name}"
            raise invalid("int_type", loc, "Input should be a valid integer", got=value)
        return value

    def integer(self, name: str) -> int:
        value = self.optional_integer(name)
        return int(self._within(name, value))

    def number(self, name: str) -> float:
        value = self._params.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            loc = f"body.sampling_params.{name}"
            raise invalid("float_type", loc, "Input should be a valid number", got=value)
        return float(self._within(name, None if value is None else float(value)))

    def integers(self, name: str) -> list[int]:
        values = self._params.get(name) or []
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            loc = f"body.sampling_params.{name}"
            raise invalid("list_type", loc, "Input should be a list of integers", got=values)
        return values

    def strings(self, name: str) -> tuple[str, ...]:
        values = self._params.get(name) or []
        if isinstance(values, str):
            return (values,)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            loc = f"body.sampling_params.{name}"
            raise invalid("list_type", loc, "Input should be a list of strings", got=values)
        return tuple(values)

    def biases(self, name: str) -> dict[int, float]:
        values = self._params.get(name) or {}
        try:
            return {int(token): float(bias) for token, bias in values.items()}
        except (AttributeError, TypeError, ValueError) as error:
            loc = f"body.sampling_params.{name}"
            text = "Input should map integers to numbers"
            raise invalid("dict_type", loc, text, got=values) from error

    def _within(self, name: str, value: float | None) -> float:
        default, holds, rule = _RANGES[name]
        if value is None:
            return default
        if not holds(value):
            _refuse(name, value, f"{name} {rule}, got {value}.")
        return value


def _token_ids(body: Mapping[str, Any]) -> tuple[int, ...]:
    loc = "body.token_ids"
    if "token_ids" not in body:
        raise invalid("missing", loc, "Field required", got=body)
    ids = body["token_ids"]
    if not isinstance(ids, list):
        raise invalid("list_type", loc, "Input should be a valid list", got=ids)
    if not ids:
        raise invalid(
            "too_short",
            loc,
            "List should have at least 1 item after validation, not 0",
            got=ids,
            ctx="{'field_type': 'List', 'min_length': 1, 'actual_length': 0}",
        )
    for index, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(
                "int_type", f"{loc}.{index}", "Input should be a valid integer", got=value
            )
    if min(ids) < 0:
        text = "token_ids must not contain negative values"
        raise invalid(
            "value_error",
            loc,
            f"Value error, {text}",
            got=ids,
            ctx=f"{{'error': ValueError('{text}')}}",
        )
    return tuple(ids)


def _check_length(length: int, limit: int) -> None:
    advice = "Make sure that `max_model_len` is no smaller than the number of text tokens"
    if length > limit:
        raise bad_request(
            f"The decoder prompt (length {length}) is longer than the maximum model length of "
            f"{limit}. {advice}."
        )
    if length == limit:
        raise bad_request(
            f"The decoder prompt (length {length}) plus the number of requested output tokens "
            f"(at least 1) is longer than the maximum model length of {limit}. {advice} "
            "(prompt + requested output tokens)."
        )


def _top(name: str, what: str, fields: _Fields, *, vocab: int) -> int | None:
    value = fields.optional_integer(name)
    if value is None:
        return None
    count = vocab if value == -1 else value
    if count < 0:
        _refuse(name, value, f"{name} must be non-negative or -1, got {value}.")
    if count > _MAX_LOGPROBS:
        text = f"Requested {what} logprobs of {count}, which is greater than max allowed"
        _refuse(name, count, f"{text}: {_MAX_LOGPROBS}")
    return count


def _vocabulary(name: str, ids: Iterable[int], vocab: int) -> tuple[int, ...]:
    kept = tuple(ids)
    for token in kept:
        if not 0 <= token < vocab:
            _refuse(name, token, f"{name} contains out-of-vocab token id {token}.")
    return kept


def _word(word: str, vocab: int) -> tuple[int, ...]:
    try:
        ids = tuple(int(part) for part in word.split())
    except ValueError:
        ids = ()
    if not ids:
        _refuse("bad_words", word, f"bad_words: {word!r} has no tokens in this vocabulary.")
    return _vocabulary("bad_words", ids, vocab)


def _refuse(name: str, value: object, text: str) -> NoReturn:
    raise bad_request(f"{text} (parameter={name}, value={value})", param=name)
