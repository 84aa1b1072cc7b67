"""Every built-in provider is what `providers.base` says; the registry names them by string."""

from genapi.providers.base import Provider
from genapi.providers.dynamo.provider import Dynamo
from genapi.providers.sglang.provider import SGLang
from genapi.providers.vllm.provider import VLLM

PROVIDERS: tuple[Provider, ...] = (Dynamo(), SGLang(), VLLM())
