"""Recorded exchanges as calls and replies, and a driver that runs flows from them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from genapi.wire.flow import Flow
from genapi.wire.http import HTTPCall, HTTPReply

ROOT = Path(__file__).parents[1] / "transcripts"

T = TypeVar("T")


@dataclass(frozen=True)
class Exchange:
    """One recorded call and its answer."""

    name: str
    method: str
    path: str
    json: Any
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def reply(self) -> HTTPReply:
        return HTTPReply(self.status, self.body, self.headers, f"http://recorded{self.path}")


def exchanges(engine: str, number: str) -> list[Exchange]:
    """The answered exchanges of the transcripts with this number, such as `("vllm", "08")`."""
    entries: list[dict[str, Any]] = []
    for path in sorted((ROOT / engine).glob(f"{number}_*.json")):
        recorded = json.loads(path.read_text())
        entries += recorded["calls"] if isinstance(recorded, dict) else recorded
    return [_exchange(e) for e in entries if "status" in e.get("response", {})]


def exchange(engine: str, number: str, name: str) -> Exchange:
    """The first exchange of that name."""
    return next(e for e in exchanges(engine, number) if e.name == name)


def _exchange(entry: dict[str, Any]) -> Exchange:
    request, response = entry["request"], entry["response"]
    return Exchange(
        name=entry["name"],
        method=request["method"],
        path=request["path"],
        json=request.get("json"),
        status=response["status"],
        headers=response.get("headers", {}),
        body=_body(response),
    )


def _body(response: dict[str, Any]) -> bytes:
    if "sse" in response:
        return "".join(f"{event}\n\n" for event in response["sse"]).encode()
    body = response["body"]
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()


def play(flow: Flow[T], answer: Callable[[HTTPCall], HTTPReply]) -> tuple[T, list[HTTPCall]]:
    """Run a flow; return its result and the calls that it made, in order."""
    made: list[HTTPCall] = []

    def ask(call: HTTPCall) -> HTTPReply:
        made.append(call)
        return answer(call)

    try:
        wanted = next(flow)
        while True:
            wanted = flow.send(
                tuple(map(ask, wanted)) if isinstance(wanted, tuple) else ask(wanted)
            )
    except StopIteration as stop:
        return stop.value, made
