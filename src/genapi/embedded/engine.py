"""One inference engine: continuous batching over the toy policy, pauses and caches.

Protocol-neutral: it knows steps, requests and weights, and nothing of routes or replies. The rule
of this file is the one of the real engines: whatever administers an engine (`rpc`) takes effect
between two steps, in the order of arrival, and also when the caller has gone away meanwhile.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeVar, assert_never

import numpy as np

from . import policy
from .cache import PrefixCache, block_key
from .clock import Clock
from .policy import Floats, Weights
from .requests import Request, Track, text_of
from .sampling import Sampling, listed, log_softmax, pick, rate
from .turns import Drain, Turn

__all__ = ("Engine", "EngineConfig", "EngineDeadError", "Pause", "PauseMode")

T = TypeVar("T")
PauseMode = Literal["abort", "wait", "keep"]


class EngineDeadError(Exception):
    """The engine's step failed; only a restart of its process helps."""


class Pause(Enum):
    """What a paused engine still does."""

    NONE = "none"
    NEW = "new"
    """Running sequences go on, queued ones are not admitted."""
    ALL = "all"
    """Nothing moves."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Size, limits and speed of an engine; times are seconds of its clock."""

    vocab: int = 64
    width: int = 32
    decay: float = policy.DECAY
    seed: int = 0
    eos_token_id: int | None = None
    max_model_len: int = 4096
    max_num_seqs: int = 128
    block_size: int = 16
    cache_blocks: int = 1024
    prefix_caching: bool = True
    caches_while_running: bool = True
    """Whether others may reuse output tokens of a sequence before it has ended."""
    logprobs_mode: Literal["raw_logprobs", "scaled_logprobs", "processed_logprobs"] = "raw_logprobs"
    step_s: float = 0.001
    rpc_s: float = 0.0005
    exit_s: float = 1.0
    """How long the process outlives its dead engine."""


class Engine:
    """Requests in, tokens out, one token per running sequence and step.

    `stream` tells the random numbers of unseeded requests apart between engines of one seed.
    """

    def __init__(self, config: EngineConfig, clock: Clock, *, stream: int = 0) -> None:
        self.config = config
        self.clock = clock
        self.label = "default"
        self.loaded = True
        """Whether the weights may be read; while they are being replaced, a step is fatal."""
        self.cache = PrefixCache(block_size=config.block_size, capacity=config.cache_blocks)
        self.stepped_at = -math.inf
        """When the last step ended."""
        self._pause = Pause.NONE
        self._error: Exception | None = None
        self._waiting: deque[Track] = deque()
        self._running: list[Track] = []
        self._requests: dict[Request, None] = {}
        self._stepping = False
        self._turns: deque[Turn[Any]] = deque()
        self._drains: list[Drain] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._wake = asyncio.Event()
        self._seeds = np.random.SeedSequence((config.seed, stream))
        self.install(policy.init(config.seed, vocab=config.vocab, width=config.width))

    # state

    @property
    def error(self) -> Exception | None:
        """Why the engine takes no calls, or None while it lives."""
        return self._error

    @property
    def pause_state(self) -> Pause:
        """What is held back at the moment."""
        return self._pause

    @property
    def requests(self) -> tuple[Request, ...]:
        """Requests that are not over, oldest first."""
        return tuple(self._requests)

    @property
    def num_running(self) -> int:
        """Sequences that are in the batch and hold computed values."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for their first step, or for their first one after a preemption."""
        return len(self._waiting)

    # requests

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        sampling: Sampling,
        salt: str | None = None,
        handed: Sequence[Floats] | None = None,
    ) -> Request:
        """Queue a request; it starts with the next step that has room for it.

        `handed`: values of its first positions that another engine computed.

        Raises:
            EngineDeadError: The engine is dead.
            ConnectionResetError: Its process is gone.
        """
        self._require_alive()
        streams = self._seeds.spawn(sampling.n)
        if sampling.seed is not None:
            streams = [
                np.random.SeedSequence(abs(sampling.seed) + index) for index in range(sampling.n)
            ]
        rngs = [np.random.Generator(np.random.PCG64(stream)) for stream in streams]
        request = Request(request_id, prompt, sampling, salt=salt, rngs=rngs)
        request.handed = handed
        self._requests[request] = None
        self._waiting.extend(request.tracks)
        self._wake.set()
        return request

    def abort(self, requests: Iterable[Request], *, at_step: bool = False) -> None:
        """End requests with what they have; those that are over stay as they are.

        `at_step`: those in the batch take the next step before they end, however long a pause
        keeps them from it; only queued ones end at once.
        """
        ended = [request for request in requests if not request.done]
        if at_step:
            running = {track.request for track in self._running}
            for request in running.intersection(ended):
                request.ending = True
            ended = [request for request in ended if request not in running]
            for request in ended:
                request.ended_queued = True
        for request in ended:
            for track in request.tracks:
                track.finish_reason = track.finish_reason or "abort"
            request.notify()
        if ended:
            self._sweep()

    # administration

    async def rpc(self, effect: Callable[[], T]) -> T:
        """Run `effect` between two steps, return its result `rpc_s` later.

        Raises:
            EngineDeadError: The engine is dead, or dies before the turn comes.
            Exception: Whatever `effect` raises.
        """
        self._require_alive()
        if self._stepping:
            turn = Turn(effect)
            self._turns.append(turn)
            result: T = await turn.result
        else:
            result = effect()
            if self._waiting or self._running:
                self._wake.set()
        await self.clock.sleep(self.config.rpc_s)
        return result

    def post(self, effect: Callable[[], object]) -> None:
        """Run `effect` between two steps, in order with `rpc`, without waiting for it.

        Raises:
            EngineDeadError: The engine is dead.
        """
        self._require_alive()
        if self._stepping:
            self._turns.append(Turn(effect))
        else:
            effect()
            self._wake.set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin `work`, which ends with the engine at the latest."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def outcome(self, task: asyncio.Task[T]) -> T:
        """The result of what was started; it goes on if the caller leaves.

        Raises:
            Exception: Whatever it raises, or why the engine is dead.
        """
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._error is not None:
                raise self._error from None
            raise

    async def hold(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause.

        `abort` ends what is in the engine, queued requests included; `wait` lets running sequences
        end; `keep` freezes everything. Later requests are queued. `clear_cache` forgets cached
        prefixes, and under `keep` also the values of frozen sequences, which compute them anew
        after `resume`. Returns when nothing runs any more, for `wait` after an unbounded time.
        """
        drain = await self.rpc(lambda: self._hold(mode, clear_cache=clear_cache))
        await drain.over

    def freeze(self) -> None:
        """Let nothing move from the next step on; what was computed stays. Call it in a turn."""
        self._pause = Pause.ALL

    def preempt(self) -> None:
        """Put the batch at the end of the queue, without its values. Call it in a turn."""
        for track in self._running:
            track.forget()
            track.preemptions += 1
        self._waiting.extend(self._running)
        self._running.clear()

    def resume(self) -> None:
        """Let everything move again; harmless when not paused. Call it through `rpc`."""
        self._pause = Pause.NONE

    def reset_prefix_cache(self, *, preempt: bool) -> bool:
        """Forget cached prefixes; False, and nothing done, while sequences hold values.

        With `preempt` those sequences go back to the queue and compute everything anew. Call it
        through `rpc`.
        """
        if self._running and not preempt:
            return False
        for track in reversed(self._running):
            track.forget()
            self._waiting.appendleft(track)
        self._running.clear()
        self.cache.clear()
        return True

    def install(self, weights: Weights) -> None:
        """Serve these weights from the next step on; values computed before stay what they are."""
        self.weights = weights
        self._model = policy.prepare(weights, decay=self.config.decay)

    # life

    async def run(self) -> None:
        """Step while there is work; return when the engine is dead."""
        while self._error is None:
            self._admit()
            if not self._running or self._pause is Pause.ALL:
                self._wake = asyncio.Event()
                await self._wake.wait()
                continue
            self._stepping = True
            try:
                await self.clock.sleep(self.config.step_s)
            finally:
                self._stepping = False
            if self._error is None:
                self._step()
            while self._turns and self._error is None:
                self._turns.popleft().run()

    def fail(self, error: Exception) -> None:
        """End: every request, call and later call fails with `error`."""
        self._error = error
        for request in self.requests:
            request.fail(error)
        for turn in self._turns:
            turn.fail(error)
        for drain in self._drains:
            drain.fail(error)
        for task in self._tasks:
            task.cancel()
        self._requests.clear()
        self._waiting.clear()
        self._running.clear()
        self._turns.clear()
        self._drains.clear()
        self._wake.set()

    # internals

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its caller may have left

    def _require_alive(self) -> None:
        if self._error is not None:
            raise self._error

    def _hold(self, mode: PauseMode, *, clear_cache: bool) -> Drain:
        drain = Drain(clears_cache=clear_cache)
        if mode == "keep":
            self._pause = Pause.ALL
            if clear_cache:
                self.reset_prefix_cache(preempt=True)
            drain.finish()
            return drain
        self._pause = Pause.NEW
        self._drains.append(drain)
        if mode == "abort":
            self.abort(self.requests)
        self._settle()
        return drain

    def _settle(self) -> None:
        """Finish pauses that waited for the batch to run empty."""
        if self._running:
            return
        for drain in self._drains:
            if drain.clears_cache:
                self.cache.clear()
            drain.finish()
        self._drains.clear()

    def _sweep(self) -> None:
        """Drop sequences and requests that are over."""
        if not self.config.caches_while_running:
            for track in self._running:
                if track.finish_reason is not None:
                    self._keep(track)
        self._waiting = deque(track for track in self._waiting if track.finish_reason is None)
        self._running = [track for track in self._running if track.finish_reason is None]
        for request in [request for request in self._requests if request.done]:
            del self._requests[request]
        self._settle()

    def _admit(self) -> None:
        while (
            self._pause is Pause.NONE
            and self._waiting
            and len(self._running) < self.config.max_num_seqs
        ):
            self._running.append(self._waiting.popleft())

    def _step(self) -> None:
        if self._running and not self.loaded:
            self.fail(EngineDeadError("a step ran while the weights were being replaced"))
            return
        touched = dict.fromkeys(track.request for track in self._running)
        for track in self._running:
            self._advance(track)
        self.stepped_at = self.clock.now()
        self._sweep()
        for request in touched:
            request.notify()

    def _advance(self, track: Track) -> None:
        request, sampling = track.request, track.request.sampling
        raw = self._forward(track)
        if sampling.max_tokens == 0:
            track.finish_reason = "length"
            return
        stop_ids = list(sampling.stop_token_ids)
        eos = self.config.eos_token_id
        if eos is not None and not sampling.ignore_eos:
            stop_ids.append(eos)
        choice = pick(
            raw,
            sampling,
            prompt=request.prompt,
            output=track.output,
            stop_ids=stop_ids,
            rng=track.rng,
        )
        if sampling.logprobs is not None:
            match self.config.logprobs_mode:
                case "raw_logprobs":
                    scores = log_softmax(raw)
                case "scaled_logprobs":
                    scores = choice.scaled
                case "processed_logprobs":
                    scores = choice.processed
                case never:
                    assert_never(never)
            track.scores.append(rate(scores, choice.token_id, sampling.logprobs))
            track.listed.append(listed(scores, sampling.logprob_token_ids))
        if sampling.keeps_support:
            track.supports.append(choice.support())
        track.append(choice.token_id, label=self.label)
        self._check_stop(track, eos)
        if request.ending:
            track.finish_reason, track.stop_reason = "abort", None

    def _forward(self, track: Track) -> Floats:
        """Raw logits after the last token; computes the values of positions that have none."""
        request, model = track.request, self._model
        tokens = track.tokens
        fresh = track.hidden is None
        if fresh and request.handed is not None:
            track.rows, request.handed = list(request.handed), None
        elif fresh and self.config.prefix_caching:
            reusable = request.sampling.reusable
            track.rows = self.cache.lookup(request.salt, tokens)[:reusable] if reusable != 0 else []
            if not track.output and track.index == 0:
                request.cached_tokens = len(track.rows)
        done = 0 if fresh else len(track.rows)
        track.rows.extend(model.table[token] for token in tokens[len(track.rows) :])
        if fresh and request.sampling.prompt_logprobs is not None and request.prompt_scores is None:
            self._score_prompt(track, request.sampling.prompt_logprobs)
        track.hidden = model.fold(track.hidden, track.rows[done:])
        if fresh or self.config.caches_while_running:
            self._keep(track)
        return model.readout(track.hidden)

    def _keep(self, track: Track) -> None:
        """Let later requests reuse what this sequence has computed in full blocks."""
        if not self.config.prefix_caching:
            return
        size = self.config.block_size
        for end in range(track.kept + size, len(track.rows) + 1, size):
            track.cache_key = block_key(track.cache_key, track.tokens[end - size : end])
            self.cache.insert(track.cache_key, track.rows[end - size : end])
            track.kept = end

    def _score_prompt(self, track: Track, top: int) -> None:
        request, h = track.request, None
        request.prompt_scores = []
        for row, token in zip(track.rows, request.prompt[1:], strict=False):
            h = self._model.fold(h, [row])
            scores = log_softmax(self._model.readout(h))
            request.prompt_scores.append(rate(scores, token, top))
            request.prompt_listed.append(listed(scores, request.sampling.logprob_token_ids))

    def _check_stop(self, track: Track, eos: int | None) -> None:
        sampling, token = track.request.sampling, track.output[-1]
        if sampling.stop:
            track.text += text_of([token])
        long = (
            len(track.output) >= sampling.max_tokens
            or len(track.tokens) >= self.config.max_model_len
        )
        if len(track.output) >= sampling.min_tokens:
            if token == eos and not sampling.ignore_eos:
                track.finish_reason = "stop"
            elif token in sampling.stop_token_ids:
                track.finish_reason, track.stop_reason = "stop", token
            elif stop := next((stop for stop in sampling.stop if stop in track.text), None):
                track.finish_reason, track.stop_reason = "stop", stop
        if long and track.finish_reason is None:
            track.finish_reason = "length"
