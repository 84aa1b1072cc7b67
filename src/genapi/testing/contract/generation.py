"""Requests and replies: what every provider's generation gives."""

from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import genapi
from genapi import FinishReason
from genapi.errors import GenAPIWarning

from .bodies import shows
from .stand import Rig, Stand, finished

__all__ = ("CHAT",)

CHAT = [{"role": "user", "content": "bada gomi"}]
_CALLS = 24


@shows("generate:reply")
async def _reply(rig: Rig) -> None:
    async with rig.stand() as s:
        reply = await s.fleet.generate(s.request(request_id="mine"))
        out = reply.output
        assert len(out.token_ids) == 8
        assert out.logprobs is not None
        assert out.logprobs.dtype == np.float32
        assert out.logprobs.shape == (8,)
        assert np.isfinite(out.logprobs).all()
        assert not out.logprobs.flags.writeable
        assert out.finish_reason is FinishReason.LENGTH
        assert out.is_complete
        assert len(out.policy) == 8
        assert reply.prompt_token_ids in (None, list(s.carrier.prompt))
        assert reply.request_id == "mine"
        assert reply.worker is not None
        assert reply.worker.provider == rig.profile.provider
        assert [a.error for a in reply.attempts] == [None]
        assert reply.attempts[0].wire_id != "mine"


@shows("generate:greedy")
async def _greedy(rig: Rig) -> None:
    async with rig.stand(2) as s:
        replies = await s.everywhere(tokens=12)
        assert len(replies) == 2
        for reply in replies:
            s.check(0, reply)


@shows("generate:no-scores")
async def _no_scores(rig: Rig) -> None:
    async with rig.stand() as s:
        reply = await s.fleet.generate(s.request(logprobs=None))
        assert reply.output.logprobs is None
        assert reply.output.top_logprobs is None
        assert reply.prompt_logprobs is None


@shows("generate:candidates")
async def _candidates(rig: Rig) -> None:
    async with rig.stand() as s:
        out = (await s.fleet.generate(s.request(logprobs=3))).output
        assert out.top_logprobs is not None
        assert out.logprobs is not None
        for token, score, top in zip(out.token_ids, out.logprobs, out.top_logprobs, strict=True):
            best = dict(zip(top.token_ids, top.logprobs, strict=True))
            assert len(best) >= 3
            assert best[token] == score == max(best.values())
        plain = (await s.fleet.generate(s.request(logprobs=0))).output
        assert plain.logprobs is not None
        assert not any(len(top.token_ids) > 1 for top in plain.top_logprobs or ())


@shows("generate:prompt-scores")
async def _prompt_scores(rig: Rig) -> None:
    async with rig.stand() as s:
        reply = await s.fleet.generate(s.request(sampling={"prompt_logprobs": 0}))
        assert reply.prompt_logprobs is not None
        assert reply.prompt_logprobs.shape == (len(s.carrier.prompt),)
        assert np.isnan(reply.prompt_logprobs[0])
        assert np.isfinite(reply.prompt_logprobs[1:]).all()


@shows("generate:stop-id")
async def _stop_id(rig: Rig) -> None:
    async with rig.stand() as s:
        free = (await s.fleet.generate(s.request())).output.token_ids
        stop = free[3]
        stops = {"stop_token_ids": [stop], "ignore_eos": False}
        out = (await s.fleet.generate(s.request(sampling=stops))).output
        assert out.token_ids == free[: list(free).index(stop) + 1]
        assert out.finish_reason is FinishReason.STOP
        assert out.stop_reason == stop
        assert out.is_complete


@shows("generate:outputs")
async def _outputs(rig: Rig) -> None:
    async with rig.stand() as s:
        asked = s.request(sampling={"n": 3, "temperature": 1.0})
        for reply in (await s.fleet.generate(asked), await s.streamed(asked)):
            assert [out.index for out in reply.outputs] == [0, 1, 2]
            assert [len(out.token_ids) for out in reply.outputs] == [8] * 3
            with pytest.raises(ValueError, match="3 outputs"):
                _ = reply.output


@shows("generate:seed")
async def _seed(rig: Rig) -> None:
    async with rig.stand() as s:
        asked = [s.request(sampling={"temperature": 1.0, "seed": seed}) for seed in (5, 5, 6)]
        first, again, other = [(await s.fleet.generate(one)).output.token_ids for one in asked]
        assert first == again != other


@shows("generate:mode")
async def _mode(rig: Rig) -> None:
    async with rig.stand() as s:
        whole = await s.fleet.generate(s.request())
        streamed = await s.streamed(s.request())
        assert whole.logprobs_mode == streamed.logprobs_mode == rig.profile.logprobs_mode


@shows("generate:remark")
async def _remark(rig: Rig) -> None:
    warm = {"temperature": 0.5}
    async with rig.stand() as s:
        with pytest.warns(GenAPIWarning, match="temperature"):
            await s.fleet.generate(s.request(sampling=warm))
    async with rig.stand(strict=True) as s:
        with pytest.raises(genapi.ReplyError, match="temperature"):
            await s.fleet.generate(s.request(sampling=warm))
        await s.fleet.generate(s.request(sampling={"temperature": 1.0}))


@shows("generate:vocabulary")
async def _vocabulary(rig: Rig) -> None:
    beyond = 10_000_000
    async with rig.stand() as s:
        with pytest.raises((genapi.ConfigError, genapi.ProviderError), match=str(beyond)):
            await s.fleet.generate(s.request(prompt_token_ids=[1, beyond]))
        assert (await s.fleet.generate(s.request())).output.is_complete


@shows("generate:overlong")
async def _overlong(rig: Rig) -> None:
    async with rig.stand() as s:
        known = s.fleet.membership.capabilities()
        assert known is not None
        asked = s.request(prompt_token_ids=[5] * ((known.max_model_len or 4096) + 1))
        with pytest.raises(genapi.OverlongPromptError):
            await s.fleet.generate(asked)
        assert (await s.fleet.generate(s.request())).output.is_complete


@shows("generate:wire-ids")
async def _wire_ids(rig: Rig) -> None:
    async with rig.stand() as s:
        replies = [await s.fleet.generate(s.request(request_id="same")) for _ in range(2)]
        assert {reply.request_id for reply in replies} == {"same"}
        assert len({reply.attempts[0].wire_id for reply in replies}) == 2


@shows("generate:usage")
async def _usage(rig: Rig) -> None:
    async with rig.stand() as s:
        asked = s.request(tokens=6)
        for reply in (await s.fleet.generate(asked), await s.streamed(asked)):
            assert reply.usage.prompt_tokens == len(s.carrier.prompt)
            assert reply.usage.completion_tokens == 6


@shows("generate:turn")
async def _turn(rig: Rig) -> None:
    async with rig.stand() as s:
        asked = s.request(tokens=4, session="one")
        first = await s.fleet.generate(asked)
        more = asked.extended(first.output.token_ids, [7, 8])
        second = await s.fleet.generate(more)
        turns = (*s.carrier.prompt, *first.output.token_ids, 7, 8)
        assert second.prompt_token_ids in (None, list(turns))
        s.carrier.check(0, turns, second.output.token_ids)


async def _said(rig: Rig, **prompt: Any) -> None:
    async with rig.stand() as s:
        reply = await s.fleet.generate(s.request(prompt_token_ids=None, **prompt))
        out, ids = reply.output, reply.prompt_token_ids
        assert ids is not None
        s.carrier.check(0, ids, out.token_ids)
        assert len(out.token_ids) == reply.usage.completion_tokens == 8
        assert reply.usage.prompt_tokens == len(ids)
        assert out.logprobs is not None
        assert np.isfinite(out.logprobs).all()
        assert out.text
        again = await s.fleet.generate(s.request(prompt_token_ids=ids))
        assert again.output.token_ids == out.token_ids


@shows("generate:text")
async def _text(rig: Rig) -> None:
    await _said(rig, prompt="bada gomi")


@shows("generate:chat")
async def _chat(rig: Rig) -> None:
    await _said(rig, messages=CHAT)


@shows("generate:session")
async def _session(rig: Rig) -> None:
    async with rig.stand(2) as s:
        for session in ("a", "b", "c"):
            asked = s.request(tokens=1, session=session)
            assert len({str((await s.fleet.generate(asked)).worker) for _ in range(4)}) == 1


@shows("generate:many")
async def _many(rig: Rig) -> None:
    async with rig.stand(2) as s:
        prompts = [s.carrier.prompt[: 2 + number] for number in range(_CALLS)]
        replies: dict[int, genapi.GenerateResponse] = {}

        async def ask(number: int) -> None:
            asked = s.request(tokens=3, prompt_token_ids=prompts[number], request_id=str(number))
            replies[number] = await s.fleet.generate(asked)

        async with anyio.create_task_group() as group:
            for number in range(_CALLS):
                group.start_soon(ask, number)
        for number, reply in replies.items():
            assert reply.request_id == str(number)
            assert reply.prompt_token_ids in (None, list(prompts[number]))
            assert len(reply.output.token_ids) == 3
        assert len(replies) == _CALLS


@shows("stream:equal")
async def _equal(rig: Rig) -> None:
    async with rig.stand() as s:
        best = 0 if "generate:candidates" in rig.profile.excluded else 3
        asked = s.request(tokens=24, logprobs=best)
        await s.fleet.generate(asked)  # from here on both find the prompt in a cache
        whole, streamed = (await s.fleet.generate(asked)).output, (await s.streamed(asked)).output
        for name in ("token_ids", "text", "finish_reason", "stop_reason", "policy"):
            assert getattr(streamed, name) == getattr(whole, name)
        assert streamed.logprobs is not None
        assert whole.logprobs is not None
        assert np.allclose(streamed.logprobs, whole.logprobs, atol=1e-4)
        assert (streamed.top_logprobs is None) == (whole.top_logprobs is None) == (not best)
        one, other = ([t.token_ids for t in o.top_logprobs or ()] for o in (streamed, whole))
        assert one == other


@shows("stream:chat")
async def _streamed_chat(rig: Rig) -> None:
    async with rig.stand() as s:
        asked = s.request(tokens=24, prompt_token_ids=None, messages=CHAT)
        whole, streamed = await s.fleet.generate(asked), await s.streamed(asked)
        assert streamed.prompt_token_ids == whole.prompt_token_ids
        for name in ("token_ids", "text", "finish_reason", "policy"):
            assert getattr(streamed.output, name) == getattr(whole.output, name)
        assert streamed.output.text


@shows("stream:pieces")
async def _pieces(rig: Rig) -> None:
    async with rig.stand() as s, s.fleet.stream(s.request(tokens=24)) as events:
        *pieces, last = [event async for event in events]
        assert isinstance(last, genapi.Finished)
        ids = [
            token
            for piece in pieces
            if isinstance(piece, genapi.TokenChunk)
            for token in piece.token_ids
        ]
        assert last.reply.output.token_ids == ids
        assert len(pieces) > 1


async def _idle(s: Stand) -> None:
    with anyio.fail_after(5):
        while s.servers.running(0):
            await anyio.lowlevel.checkpoint()


@shows("stream:left")
async def _left(rig: Rig) -> None:
    async with rig.stand() as s:
        async with s.fleet.stream(s.request(tokens=2000)) as events:
            await anext(events)
            assert s.servers.running(0) == 1
        await _idle(s)


@shows("generate:cancelled")
async def _cancelled(rig: Rig) -> None:
    async with rig.stand() as s:
        async with anyio.create_task_group() as group:
            group.start_soon(s.fleet.generate, s.request(tokens=2000))
            with anyio.fail_after(5):
                while not s.servers.running(0):
                    await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        await _idle(s)


@shows("abort:label")
async def _abort(rig: Rig) -> None:
    async with rig.stand() as s:
        asked = s.request(tokens=s.carrier.long, request_id="long")
        async with s.fleet.stream(asked) as events:
            await anext(events)
            assert await s.fleet.abort("long") == 1
            assert await s.fleet.abort("unknown") == 0
            out = (await finished(events)).output
        assert out.finish_reason is FinishReason.ABORT
        assert not out.is_complete
        assert 0 < len(out.token_ids) < s.carrier.long


@shows("abort:neighbour")
async def _neighbour(rig: Rig) -> None:
    async with rig.stand() as s:
        long, short = (
            s.request(tokens=tokens, request_id=label)
            for tokens, label in ((s.carrier.long, "r"), (40, "r1"))
        )
        async with s.fleet.stream(long) as one, s.fleet.stream(short) as other:
            await anext(one)
            await anext(other)
            assert await s.fleet.abort("r") == 1
            assert not (await finished(one)).output.is_complete
            spared = (await finished(other)).output
        assert spared.is_complete
        assert len(spared.token_ids) == 40
