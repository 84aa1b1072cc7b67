"""The request plane at its edges: waits, deaths, aborts without a worker, streams that break."""

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import genapi
from genapi import FinishReason, GenerateRequest, GenerateResponse, RetryPolicy, TokenChunk
from genapi.embedded import Cluster, Fault
from genapi.events import Event, RequestRetried
from genapi.types.response import GenerateEvent
from tests.contract.embedded import QUICK, greedy, request, weights
from tests.support.recorded import RecordedCalls
from tests.support.spread import Spread

pytestmark = pytest.mark.anyio

GENERATE = "/inference/v1/generate"
SOON = RetryPolicy(backoff_s=0.001, max_backoff_s=0.002)
DEAD = (
    '{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root '
    'cause.","type":"InternalServerError","param":null,"code":500}}'
)


class Served:
    """A ready fleet over embedded engines, the calls to them, and what happened."""

    def __init__(self, cluster: Cluster, **options: Any) -> None:
        self.cluster = cluster
        self.calls = RecordedCalls(cluster)
        self.events: list[Event] = []
        self.fleet = genapi.connect(
            "embedded://", transport=self.calls, observe=self.events.append, **options
        )

    def fail(self, worker: int, path: str, action: Any, **details: Any) -> None:
        """Let a later call to `path` on that worker go wrong."""
        self.cluster.workers[worker].faults.add(Fault(path, action, **details))

    def sent(self) -> list[Any]:
        """The bodies of all generations, in their order."""
        return [body for _, path, body in self.calls.calls if path == GENERATE]

    async def publish(self, step: int, **more: Any) -> genapi.PublishReport:
        publisher = genapi.WeightPublisher(
            self.fleet, transport=genapi.weights.Memory(), timeouts=QUICK, **more
        )
        return await publisher.publish(step, genapi.weights.from_tensors(weights(1)))


@asynccontextmanager
async def served(workers: int = 1, **options: Any) -> AsyncIterator[Served]:
    found = Served(Cluster.from_query({"workers": str(workers)}), **options)
    async with found.fleet:
        await found.fleet.wait_ready(timeout_s=5)
        yield found


def spent(tokens: int, reply: object) -> bool:
    return isinstance(reply, GenerateResponse) and len(reply.output.token_ids) == tokens


# sending again


async def test_the_wait_before_the_next_sending_is_waited_for() -> None:
    policy = RetryPolicy(backoff_s=0.1, max_backoff_s=1.0, jitter=0.0)
    async with served(retry=policy) as s:
        for nth in (1, 2):
            s.fail(0, GENERATE, "error", nth=nth, status=503)
        began = time.monotonic()
        await s.fleet.generate(request())
        assert time.monotonic() - began >= 0.3
        assert [e.wait_s for e in s.events if isinstance(e, RequestRetried)] == [0.1, 0.2]


async def test_a_worker_whose_engine_is_dead_gets_nothing_more_and_another_one_answers() -> None:
    async with served(2, retry=SOON) as s:
        first = await s.fleet.generate(request(session="s"))
        assert first.worker is not None
        dead = int(first.worker.component[-1])
        s.fail(dead, GENERATE, "error", body=DEAD)
        reply = await s.fleet.generate(request(session="s"))
        assert reply.worker != first.worker
        assert [a.worker for a in reply.attempts] == [first.worker, reply.worker]
        assert reply.attempts[0].error is not None
        assert "EngineCore" in reply.attempts[0].error


async def test_an_engine_that_died_with_a_request_counts_as_a_lost_reply() -> None:
    async with served(2, retry=RetryPolicy(retry_lost_replies=False)) as s:
        for worker in (0, 1):
            s.fail(worker, GENERATE, "error", body=DEAD)
        with pytest.raises(genapi.ProviderError, match="EngineCore"):
            await s.fleet.generate(request())
        assert len(s.sent()) == 1


async def test_a_reply_of_a_worker_that_attests_no_version_after_a_commit_is_not_returned() -> None:
    async with served(2) as s:
        report = await s.publish(1)
        s.cluster.workers[0].restart()
        replies = [await s.fleet.generate(request(session=str(n))) for n in range(12)]
        assert {str(r.output.policy.newest) for r in replies} == {str(report.version)}
        assert sum(len(r.attempts) for r in replies) == len(replies) + 1
        fences = [w.fence for w in (await s.fleet.snapshot()).workers]
        assert fences[0] is not None
        assert "took the place of" in fences[0].reason
        assert fences[1] is None


async def test_an_unknown_version_before_any_commit_is_nothing_to_suspect() -> None:
    async with served(1) as s:
        await s.fleet.generate(request())
        assert (await s.fleet.generate(request())).output.policy.newest is None
        assert not any(m.suspect for m in s.fleet.membership.members.values())


async def test_an_abort_that_is_not_answered_does_not_outlast_the_request() -> None:
    async with served(1) as s:
        s.fail(0, GENERATE, "lose_reply")
        s.fail(0, "/inference/v1/abort_requests", "never_answer")
        since = anyio.current_time()
        with pytest.raises(genapi.TransportError, match=r"timeout_s=0\.3"):
            await s.fleet.generate(request(timeout_s=0.3))
        assert anyio.current_time() - since < 3


# what is sent


async def test_the_only_model_that_is_served_is_named_for_the_user() -> None:
    async with served() as s:
        await s.fleet.generate(request())
        known = s.fleet.membership.capabilities()
        assert known is not None
        assert [body["model"] for body in s.sent()] == list(known.models)


async def test_a_model_that_the_user_names_is_asked_for_whatever_is_served() -> None:
    async with served(model="another") as s:
        with pytest.raises(genapi.ConfigError, match="another"):
            await s.fleet.generate(request())
        assert [body["model"] for body in s.sent()] == ["another"]


async def test_requests_carry_the_committed_version_as_their_salt() -> None:
    async with served() as s:
        await s.fleet.generate(request())
        first = await s.publish(1)
        await s.fleet.generate(request())
        second = await s.publish(2)
        await s.fleet.generate(request())
        salts = [body.get("cache_salt") for body in s.sent()]
        assert salts[0] is None
        assert first.version.label in salts[1]
        assert second.version.label in salts[2]


async def test_a_publication_that_flushes_needs_no_salt() -> None:
    async with served() as s:
        await s.publish(1, prefix_cache="flush")
        await s.fleet.generate(request())
        assert s.sent()[0].get("cache_salt") is None


# aborts


async def test_an_abort_reaches_the_worker_that_a_router_chose() -> None:
    cluster = Cluster.from_query({"workers": "3"})
    carrier = Spread(cluster)
    carrier.route = lambda count: 0 if count else 2  # an abort through it goes astray
    async with genapi.connect(carrier.routed, transport=carrier) as fleet:
        await fleet.wait_ready(timeout_s=5)
        async with fleet.stream(request(tokens=3000, request_id="long")) as events:
            await anext(events)
            assert await fleet.abort("long") == 1
            with anyio.fail_after(5):
                last = [event async for event in events][-1]
        assert isinstance(last, genapi.Finished)
        assert last.reply.output.finish_reason is FinishReason.ABORT
        assert cluster.workers[2].engine.num_running == 0
    await carrier.aclose()


async def aborted_while(s: Served, request_id: str) -> GenerateResponse:
    replies: list[GenerateResponse] = []

    async def ask() -> None:
        replies.append(await s.fleet.generate(request(request_id=request_id)))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert not replies
        with anyio.fail_after(5):
            assert await s.fleet.abort(request_id) == 1
    return replies[0]


async def test_an_abort_while_waiting_to_send_again_ends_the_wait_and_sends_nothing() -> None:
    async with served(retry=RetryPolicy(backoff_s=60.0, max_backoff_s=60.0)) as s:
        s.fail(0, GENERATE, "error", status=503)
        with anyio.fail_after(10):
            reply = await aborted_while(s, "backing-off")
        assert reply.output.finish_reason is FinishReason.ABORT
        assert reply.output.token_ids == ()
        assert [a.error is not None for a in reply.attempts] == [True]
        assert len(s.sent()) == 1


async def test_an_abort_while_waiting_for_a_slot_ends_that_request_and_no_other() -> None:
    async with served(max_in_flight=1) as s:
        async with s.fleet.stream(request(tokens=40)) as events:
            await anext(events)
            with anyio.fail_after(10):
                reply = await aborted_while(s, "queued")
            assert reply.output.finish_reason is FinishReason.ABORT
            assert reply.attempts == ()
            last = [event async for event in events][-1]
        assert isinstance(last, genapi.Finished)
        assert last.reply.output.is_complete
        assert len(s.sent()) == 1
        assert spent(8, await s.fleet.generate(request()))  # the slot is free again


# streams


async def events_of(
    s: Served,
    asked: GenerateRequest,
    note: Callable[[GenerateEvent], object] = lambda _: None,
) -> None:
    """Stream to the end, and tell of every event."""
    async with s.fleet.stream(asked) as events:
        async for event in events:
            note(event)


async def test_an_error_inside_a_200_is_the_error_that_it_is() -> None:
    body = (
        '{"error":{"message":"This model\'s maximum context length is 4 tokens.",'
        '"type":"BadRequestError","param":"input_tokens","code":400}}'
    )
    async with served() as s:
        s.fail(0, GENERATE, "error", status=200, body=body)
        with pytest.raises(genapi.GenAPIError, match="maximum context length"):
            await events_of(s, request())


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_strict_fleet_takes_no_score_of_more_than_certainty(streamed: bool) -> None:
    async with served(strict=True) as s:
        await s.fleet.generate(request())
        raw = (await s.calls.send("memory://0", _call(s.sent()[0]))).json_object()
        raw["choices"][0]["logprobs"]["content"][1]["logprob"] = 1.5
        s.fail(0, GENERATE, "error", status=200, body=json.dumps(raw))
        with pytest.raises(genapi.ReplyError, match="1 of 8 tokens have no usable logprob"):
            await (events_of(s, request()) if streamed else s.fleet.generate(request()))


async def test_a_server_that_answers_a_stream_in_one_piece_is_read_all_the_same() -> None:
    async with served() as s:
        whole = await s.fleet.generate(request())
        raw = await s.calls.send("memory://0", _call(s.sent()[0]))
        s.fail(0, GENERATE, "error", status=200, body=raw.body.decode())
        async with s.fleet.stream(request()) as events:
            first, last = [event async for event in events]
        assert isinstance(first, TokenChunk)
        assert first.token_ids == whole.output.token_ids
        assert isinstance(last, genapi.Finished)
        assert last.reply.output == whole.output


def _call(body: Any) -> Any:
    from genapi.wire.http import HTTPCall, json_body  # noqa: PLC0415 - one test's

    return HTTPCall(method="POST", path=GENERATE, body=json_body(body))


async def broken(s: Served, **more: Any) -> tuple[genapi.IncompleteError, list[int]]:
    """The error of a stream that does not end, and what was handed out before it."""
    seen: list[int] = []

    def note(event: GenerateEvent) -> None:
        if isinstance(event, TokenChunk):
            seen.extend(event.token_ids)

    with anyio.fail_after(10), pytest.raises(genapi.IncompleteError) as caught:
        await events_of(s, request(tokens=200, **more), note)
    return caught.value, seen


def holds_what_came(error: genapi.IncompleteError, seen: list[int]) -> None:
    partial = error.partial
    assert isinstance(partial, GenerateResponse)
    assert seen
    assert list(partial.output.token_ids) == seen
    assert list(greedy(0, [1, 2, 3], 200))[: len(seen)] == seen
    assert not partial.output.is_complete


async def test_a_stream_that_breaks_off_leaves_what_had_come_and_suspects_its_worker() -> None:
    async with served() as s:

        async def break_off(number: int) -> None:
            if number == 5:
                raise genapi.TransportError("connection reset", phase="answered")

        s.calls.on_piece = break_off
        error, seen = await broken(s)
        assert "connection reset" in str(error)
        holds_what_came(error, seen)
        assert s.fleet.membership.members["memory://0"].suspect


async def hang(number: int) -> None:
    if number == 5:
        await anyio.sleep_forever()


async def test_a_stream_in_which_nothing_comes_for_idle_timeout_s_ends_with_what_had_come() -> None:
    async with served(idle_timeout_s=0.05) as s:
        s.calls.on_piece = hang
        error, seen = await broken(s)
        assert "idle_timeout_s=0.05" in str(error)
        holds_what_came(error, seen)


async def test_a_stream_that_outlasts_its_timeout_ends_with_what_had_come() -> None:
    async with served(idle_timeout_s=30.0) as s:
        s.calls.on_piece = hang
        error, seen = await broken(s, timeout_s=0.1)
        assert "timeout_s=0.1" in str(error)
        assert "idle" not in str(error)
        holds_what_came(error, seen)


async def test_the_time_that_the_user_takes_between_two_tokens_is_no_silence_of_the_server() -> (
    None
):
    async with served(idle_timeout_s=0.05) as s:
        seen = []
        async with s.fleet.stream(request(tokens=3)) as events:
            async for event in events:
                seen.append(event)
                await anyio.sleep(0.1)
        assert isinstance(seen[-1], genapi.Finished)
        assert seen[-1].reply.output.token_ids == greedy(0, [1, 2, 3], 3)


async def test_a_streams_timeout_does_not_reach_into_the_users_own_code() -> None:
    began = anyio.current_time()
    async with served() as s, s.fleet.stream(request(tokens=3, timeout_s=0.2)) as events:
        assert isinstance([event async for event in events][-1], genapi.Finished)
        await anyio.sleep(0.3)
    assert anyio.current_time() - began >= 0.3
