"""The recipe of the docs that goes on where a reply was aborted, over replies of every length."""

import ast
import asyncio
import itertools
import pathlib
import re
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from genapi import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    GenerateResponse,
    PolicyTrace,
    PolicyVersion,
    SamplingParams,
    Span,
    TokenIds,
)

pytestmark = pytest.mark.case("ABORT-07")

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "guide" / "versions.md"
WHOLE = 16
LEAST = 4
PROMPT = [1, 2, 3]


def recipe() -> Callable[[Any, GenerateRequest], Awaitable[GenerateOutput]]:
    (source,) = (
        fence
        for fence in re.findall(
            r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
        )
        if "async def completed" in fence
    )
    wanted = (ast.Import, ast.ImportFrom, ast.AsyncFunctionDef)
    # The run of the example has awaits at its top level.
    tree = compile(source, PAGE, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    tree.body = [node for node in tree.body if isinstance(node, wanted)]
    names: dict[str, Any] = {}
    exec(compile(tree, PAGE, "exec"), names)  # noqa: S102 - the code is ours, from the checkout
    found: Callable[[Any, GenerateRequest], Awaitable[GenerateOutput]] = names["completed"]
    return found


class Aborting:
    """Answers with that many tokens and an abort each time, at last with what is left."""

    def __init__(self, lengths: list[int], end: FinishReason = FinishReason.LENGTH) -> None:
        self.end = end
        self.asked: list[GenerateRequest] = []
        self._lengths = iter(lengths)

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        step = len(self.asked)
        self.asked.append(request)
        count = next(self._lengths, None)
        aborts = count is not None and count <= request.sampling.max_tokens
        tokens = count if count is not None and aborts else request.sampling.max_tokens
        version = PolicyVersion(run="r", step=step)
        span = Span(start=0, end=max(tokens, 1), lo=version, hi=version, context=version)
        first = len(request.prompt_token_ids or ())
        output = GenerateOutput(
            token_ids=TokenIds(range(first, first + tokens)),
            logprobs=np.full(tokens, -1.0 - step, dtype=np.float32),
            finish_reason=FinishReason.ABORT if aborts else self.end,
            policy=PolicyTrace(spans=(span,) if tokens else (), source="engine"),
        )
        return GenerateResponse(request_id="r", outputs=(output,))


@given(
    lengths=st.lists(st.integers(0, WHOLE), max_size=6),
    end=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)
@example([10], FinishReason.LENGTH)
@example([0], FinishReason.STOP)
@example([WHOLE], FinishReason.LENGTH)
def test_a_reply_goes_on_after_aborts_until_it_has_all_its_tokens(
    lengths: list[int], end: FinishReason
) -> None:
    fleet = Aborting(lengths, end)
    sampling = SamplingParams(max_tokens=WHOLE, min_tokens=LEAST)
    request = GenerateRequest(prompt_token_ids=PROMPT, sampling=sampling)
    out = asyncio.run(asyncio.wait_for(recipe()(fleet, request), 5))
    was_cut_at_last = WHOLE in itertools.accumulate(lengths[: len(fleet.asked)])
    assert out.finish_reason is (FinishReason.LENGTH if was_cut_at_last else end)
    assert list(out.token_ids) == list(range(len(PROMPT), len(PROMPT) + WHOLE))
    assert out.logprobs is not None
    assert len(out.logprobs) == len(out.policy) == WHOLE
    for at, logprob in enumerate(out.logprobs):
        version = out.policy.at(at).lo
        assert version is not None
        assert logprob == -1.0 - version.step
    for asked in fleet.asked:
        made = len(asked.prompt_token_ids or ()) - len(PROMPT)
        assert asked.sampling.max_tokens == WHOLE - made > 0
        assert asked.sampling.min_tokens == max(0, LEAST - made)
    for before, after in zip(fleet.asked, fleet.asked[1:], strict=False):
        if before.prompt_token_ids == after.prompt_token_ids:
            assert before == after


def test_a_reply_that_is_whole_when_it_is_aborted_asks_for_nothing_more() -> None:
    fleet = Aborting([WHOLE])
    request = GenerateRequest(prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=WHOLE))
    asyncio.run(asyncio.wait_for(recipe()(fleet, request), 5))
    assert fleet.asked == [request]
