"""The contract suite on a provider that genapi does not know."""

import pytest
from genapi_tokenserver.server import cluster

from genapi.testing.contract import Case, Memory, Profile, suite

TOKENS = Profile(
    provider="tokens",
    logprobs_mode="raw",
    paths={
        "health": "/state",
        "generate": "/tokens",
        "join": "/join",
        "pause": "/pause",
        "resume": "/resume",
        "begin": "/open",
        "update": "/load",
        "finish": "/close",
        "label": "/label",
    },
    excluded={
        "generate:outputs": "one output for each request",
        "generate:text": "ids go in, and nothing else",
        "generate:chat": "ids go in, and nothing else",
        "stream:chat": "ids go in, and nothing else",
        "version:chat": "ids go in, and nothing else",
        "publish:lost-label": "the label comes with the end of the session",
        "publish:asleep": "a token server does not sleep",
    },
)
CASES = suite([TOKENS], [Memory(cluster)])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_contract(case: Case) -> None:
    await case.run()
