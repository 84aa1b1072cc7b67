"""Texts and chats under the toy vocabulary, where a token reads as its id and one blank.

A chat template that keeps messages apart, and two marks that stand for what a real model learns: up
to `THOUGHT` it thinks, from `TOOL` on it calls a tool with the ids that follow.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .requests import text_of

__all__ = ("THOUGHT", "TOOL", "Said", "chat_tokens", "said", "tokens_of")

THOUGHT = 3
TOOL = 4


@dataclass(frozen=True, slots=True)
class Said:
    """What an output says as a chat message; `call` is the name and the arguments of a tool."""

    content: str | None
    reasoning: str | None = None
    call: tuple[str, str] | None = None


def tokens_of(text: str, vocab: int) -> tuple[int, ...]:
    """Ids of a text under the toy vocabulary: numbers are themselves, other words some id."""
    words = re.findall(r"\S+", text) or ["0"]
    return tuple(
        int(word) if word.isdecimal() and int(word) < vocab else sum(word.encode()) % vocab
        for word in words
    )


def chat_tokens(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, vocab: int
) -> tuple[int, ...]:
    """Ids of a chat: tools, then each message behind its role, then the turn of the assistant.

    Raises:
        ValueError: A message is none, or its content is neither text nor parts of text.
    """
    words = [f"<tool> {_function(tool)}" for tool in tools]
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise ValueError("each message needs a role")  # noqa: TRY004 - what callers refuse
        words.append(f"<|start|> {message['role']} {_content(message.get('content'))} <|end|>")
    return tokens_of(" ".join([*words, "<|start|> assistant"]), vocab)


def said(
    output: Sequence[int], tools: Sequence[Mapping[str, Any]], *, thinks: bool, last: bool
) -> Said:
    """An output read as a chat message.

    Args:
        output: Its ids.
        tools: What may be called; nothing is read as a call without.
        thinks: Whether reasoning is told apart.
        last: Whether nothing more comes.
    """
    thought: str | None = None
    rest = list(output)
    if thinks:
        end = rest.index(THOUGHT) if THOUGHT in rest else len(rest)
        thought, rest = text_of(rest[:end]), rest[end + 1 :]
    if not tools or TOOL not in rest:
        return Said(text_of(rest), thought)
    at = rest.index(TOOL)
    arguments = f'{{"ids":[{",".join(map(str, rest[at + 1 :]))}{"]}" if last else ""}'
    return Said(text_of(rest[:at]) or None, thought, (_function(tools[0]), arguments))


def _function(tool: Mapping[str, Any]) -> str:
    return str((tool.get("function") or {}).get("name"))


def _content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        return " ".join(str(part.get("text")) for part in content)
    raise ValueError("the embedded engine reads messages of text only")
