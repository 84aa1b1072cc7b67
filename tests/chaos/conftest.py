"""The fixtures of real engines, for scenarios that kill them."""

from tests.engines.conftest import (
    models,
    oracle,
    reference_environment,
    serve,
    transformers,
    vllm_environment,
)

__all__ = ("models", "oracle", "reference_environment", "serve", "transformers", "vllm_environment")
