"""What may be a secret among flags and variables, by its name or by what is in it.

A name is read word by word, wherever the word stands. Some words leave no doubt; of the others
engines have many flags that count tokens or name headers, and those are known by their value, by
their last word, or by their whole name.
The rule of this file: a secret that is not known as one is shown to everybody, so that what is in
doubt is one; a flag of an engine's own that is none has to pass.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from genapi.shown import has_user_info

__all__ = ("holds_secret", "may_be_secret", "words_of")

_SECRET = frozenset((
    "accesskey", "accesstoken", "apikey", "apitoken", "authorization", "authtoken", "bearer",
    "cred", "creds", "pat", "passphrase", "passwd", "password", "passwords", "privatekey", "pw",
    "pwd", "secret", "secretkey", "secrets",
))  # fmt: skip
_SECRET_AT_THE_END = frozenset((
    "jwt", "pass",
))  # fmt: skip
_DOUBTFUL = frozenset((
    "auth", "cookie", "cookies", "credential", "credentials", "header", "headers", "key",
    "keys", "token", "tokens",
))  # fmt: skip
_SECRET_PAIR = re.compile(
    r"(^|-)((api|access|decryption|encryption|license|private|signing)-keys?"
    r"|(access|api|auth|github|gitlab|hf|hub|refresh|session|user)-tokens?)(-|$)"
)
_SECRET_FIELDS = frozenset((
    "auth", "cookie", "credential", "credentials", "token",
))  # fmt: skip
"""What a field of JSON is called that is nothing else; `eos_token` and `key` are, there."""
_PLACES = frozenset((
    "dir", "file", "files", "folder", "keyfile", "path", "paths",
))  # fmt: skip
_NO_SECRETS = frozenset((
    "audience", "buckets", "count", "details", "format", "id", "ids", "issuer", "kind", "len",
    "length", "limit", "map", "mapping", "method", "mode", "name", "names", "only", "override",
    "prefix", "ratio", "size", "threshold", "type", "uri", "url", "usage",
))  # fmt: skip
_KNOWN = frozenset((
    "allowed-headers", "disagg-config-key", "dump-requests-exclude-meta-keys", "mesh-tls-key",
    "request-id-headers", "routing-key-headers", "storage-context-headers",
    "tokenizer-metrics-custom-labels-header", "trust-tenant-header",
))  # fmt: skip
"""Flags of engines whose value is a path, or names of headers and fields."""
_NUMBERS = re.compile(
    r"(?i)[-+\d.,:_%\s\[\]e]*[kmgt]?i?b?|true|false|yes|no|on|off|none|null|auto|default"
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_HEADER = re.compile(r"(?i)\b(authorization|x-api-key|cookie)\s*[:=]\s*\S|\bbearer\s+\S")
_PAIR = re.compile(r"([A-Za-z][\w.-]*)\s*[=:]\s*(?!//)(\S.*)", re.DOTALL)


def words_of(name: str) -> list[str]:
    """The words of a name, in lower case: `HF_TOKEN`, `hf-token` and `hfToken` have the same."""
    return [word for word in re.split(r"[^a-z0-9]+", _HUMP.sub("-", name).lower()) if word]


def may_be_secret(name: str, value: str | None) -> bool:
    """Whether a flag or variable may hold a secret; `value` is None where it has none."""
    words = words_of(name)
    if not words or words[-1] in _PLACES:
        return False
    if _SECRET.intersection(words) or words[-1] in _SECRET_AT_THE_END:
        return True
    full = "-".join(words)
    if not _DOUBTFUL.intersection(words) or full in _KNOWN or words[-1] in _NO_SECRETS:
        return False
    if value is None or not value.strip():
        return False
    if _SECRET_PAIR.search(full):
        return True
    counts = words[-1] not in ("key", "token") or words[-2:-1] in (["first"], ["per"])
    return not (counts and _NUMBERS.fullmatch(value.strip()))


def holds_secret(text: str) -> bool:
    """Whether a value has a secret in it: user info of a URL, a header, or a field so called."""
    if has_user_info(text) or _HEADER.search(text):
        return True
    pair = _PAIR.fullmatch(text)
    if pair is not None and may_be_secret(pair[1], pair[2]):
        return True
    if text.lstrip()[:1] not in ("{", "["):
        return False
    try:
        return any(_is_field_of_secret(*field) for field in _fields(msgspec.json.decode(text)))
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False


def _fields(value: Any) -> Iterator[tuple[str, str]]:
    """Every field with a text in JSON, however deep."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, str) and inner:
                yield name, inner
            else:
                yield from _fields(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _fields(inner)


def _is_field_of_secret(name: str, text: str) -> bool:
    words = words_of(name)
    full = "-".join(words)
    if not words or words[-1] in _PLACES or words[-1] in _NO_SECRETS:
        return False
    named = bool(_SECRET.intersection(words) or _SECRET_PAIR.search(full))
    return named or full in _SECRET_FIELDS or bool(_HEADER.search(text))
