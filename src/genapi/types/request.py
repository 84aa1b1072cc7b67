"""What a user asks for: `SamplingParams`, `GenerateRequest`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    SerializeAsAny,
    StrictBool,
    model_validator,
)

from genapi.types.arguments import Index, Seconds
from genapi.types.base import FrozenDict, Value
from genapi.types.ids import IdSequence, TokenIds
from genapi.types.policy import PolicyVersion

__all__ = ("GenerateRequest", "ProviderOptions", "SamplingParams", "StructuredOutput")

Count = Annotated[int, Field(ge=1, strict=True)]
Texts = tuple[str, ...]


class StructuredOutput(Value):
    """Constrains the output; exactly one of the fields is given.

    Attributes:
        json_schema: a JSON schema the text has to satisfy.
        regex: a regular expression the text has to match.
        choice: the texts to choose from.
        grammar: a grammar in the engine's notation (EBNF).
    """

    json_schema: Annotated[Mapping[str, Any], AfterValidator(FrozenDict)] | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name, value in self.__dict__.items() if value is not None]
        if len(given) != 1:
            message = f"give exactly one of json_schema, regex, choice, grammar; got {given}"
            raise ValueError(message)
        return self


class SamplingParams(Value):
    """How tokens are drawn, in the words the engines share.

    Every value that shapes the distribution or the length is always sent, so that no engine's
    own default (its `generation_config.json`, say) can step in.

    Attributes:
        max_tokens: most tokens to generate per output; required, at least 1.
        min_tokens: no stop before this many tokens.
        n: outputs per prompt.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: candidates kept; 0 or -1 keeps all.
        min_p: least probability relative to the best candidate.
        presence_penalty: in [-2, 2].
        frequency_penalty: in [-2, 2].
        repetition_penalty: more than 0; 1 is off.
        seed: makes the draw repeatable on one engine and batch.
        stop: texts that end the output.
        stop_token_ids: ids that end the output; the id itself is kept in `token_ids`.
        ignore_eos: go on past the model's end token.
        logprobs: 0 gives the chosen token's log-probability, k > 0 the best candidates as well
            (vLLM counts the chosen token as one of the k), None turns them off.
        prompt_logprobs: the same for the prompt's tokens; None is off.
        logit_bias: added to the logit of each id.
        bad_words: texts that may not appear.
        structured_output: constrains the text.
    """

    max_tokens: Count
    min_tokens: Annotated[int, Field(ge=0, strict=True)] = 0
    n: Count = 1
    temperature: Annotated[float, Field(strict=True, ge=0)] = 1.0
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, strict=True)] = 0
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(strict=True, ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(strict=True, gt=0)] = 1.0
    seed: Annotated[int, Field(strict=True)] | None = None
    stop: Texts = ()
    stop_token_ids: IdSequence = TokenIds()
    ignore_eos: StrictBool = False
    logprobs: Annotated[int, Field(ge=0, strict=True)] | None = 0
    prompt_logprobs: Annotated[int, Field(ge=0, strict=True)] | None = None
    logit_bias: Annotated[Mapping[int, float], AfterValidator(FrozenDict)] = FrozenDict()
    bad_words: Texts = ()
    structured_output: StructuredOutput | None = None

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.min_tokens > self.max_tokens:
            message = f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}"
            raise ValueError(message)
        return self


class ProviderOptions(Value):
    """Base of every provider's own request options (`genapi.providers.vllm.Options`)."""

    provider: str


def _step(version: int | PolicyVersion | None) -> int | None:
    return version.step if isinstance(version, PolicyVersion) else version


def _options(value: Any) -> Any:
    """Options as written to JSON become the options of the provider that they name."""
    if not isinstance(value, Mapping):
        return value
    for kind in _option_kinds(ProviderOptions):
        if kind.model_fields["provider"].default == value.get("provider"):
            return kind.model_validate(value)
    raise ValueError(
        f"options of provider {value.get('provider')!r} are not known here; "
        "import genapi.providers.<name>.Options first"
    )


def _option_kinds(base: type[ProviderOptions]) -> list[type[ProviderOptions]]:
    kinds = base.__subclasses__()
    return kinds + [more for kind in kinds for more in _option_kinds(kind)]


class GenerateRequest(Value):
    """One prompt to continue.

    Attributes:
        prompt_token_ids: the prompt as token ids. Exactly one of the three prompt forms is given.
        prompt: the prompt as text.
        messages: the prompt as chat messages.
        tools: tools that the model may call, as OpenAI's chat route takes them; with `messages`.
        sampling: how to draw; `max_tokens` is required.
        request_id: a label of the user's, echoed in the reply; ids on the wire are genapi's own.
        session: requests of one session prefer one worker.
        cache_salt: keeps prefix-cache entries of other salts out.
        priority: lower is served first, where the server schedules by priority.
        lora: name of the adapter to generate with.
        tag: the user's own mark; never sent.
        timeout_s: bound on the whole call in seconds, retries and waiting included; None = none.
        min_version: wait for a policy at least this new (a step or a version).
        exact_version: wait for exactly this policy.
        options: options of one provider only, such as `genapi.providers.vllm.Options(...)`.
    """

    prompt_token_ids: IdSequence | None = None
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Annotated[Sequence[Mapping[str, Any]], AfterValidator(tuple)] = ()
    sampling: SamplingParams
    request_id: str | None = None
    session: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    priority: Annotated[int, Field(strict=True)] = 0
    lora: Annotated[str, Field(min_length=1)] | None = None
    tag: Any = None
    timeout_s: Seconds | None = None
    min_version: Annotated[int, Field(ge=0, strict=True), Index] | PolicyVersion | None = None
    exact_version: Annotated[int, Field(ge=0, strict=True), Index] | PolicyVersion | None = None
    options: Annotated[SerializeAsAny[BaseModel], BeforeValidator(_options)] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        forms = ("prompt_token_ids", "prompt", "messages")
        given = [form for form in forms if getattr(self, form) is not None]
        if len(given) != 1:
            message = f"give exactly one of {', '.join(forms)}; got {given or 'none'}"
            raise ValueError(message)
        if self.tools and self.messages is None:
            message = "tools= goes with messages=: without a chat template nobody is told of them"
            raise ValueError(message)
        low, exact = _step(self.min_version), _step(self.exact_version)
        if low is not None and exact is not None and low > exact:
            message = f"min_version {low} is newer than exact_version {exact}: nothing meets both"
            raise ValueError(message)
        if len(getattr(self, given[0])) == 0:
            message = f"{given[0]} is empty; a prompt has at least one item"
            raise ValueError(message)
        return self

    def extended(self, *token_ids: Sequence[int]) -> Self:
        """The next turn: this prompt with `token_ids` appended, everything else the same.

        Raises:
            ValueError: the prompt is not given as token ids.
        """
        if self.prompt_token_ids is None:
            message = "only a request with prompt_token_ids can be extended by token ids"
            raise ValueError(message)
        prompt = TokenIds(self.prompt_token_ids)
        for more in token_ids:
            prompt = prompt + TokenIds(more)
        return self.model_copy(update={"prompt_token_ids": prompt})
