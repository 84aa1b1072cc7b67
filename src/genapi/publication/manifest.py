"""How one manifest differs from the one before it, by name and by pattern.

The rule of this file: every name that only one of the two has is told exactly once, as missing,
extra, renamed or tied; what both have is told when its dtype or its shape has changed.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeVar

__all__ = ("Described", "Difference", "DifferenceKind", "describe", "explain")

T = TypeVar("T")

DifferenceKind = Literal["missing", "extra", "renamed", "tied", "dtype", "shape"]

_SHOWN = 3
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")
"""What wrappers of a module put into its names, anywhere in them."""
_HEADS = ("lm_head.weight", "output.weight", "output_layer.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "tok_embeddings.weight", "wte.weight", "embed_in.weight")


class Described(Protocol):
    """What a manifest says of one tensor."""

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        ...

    @property
    def dtype(self) -> str:
        """Such as `bfloat16`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape."""
        ...


@dataclass(frozen=True, slots=True)
class Difference:
    """One kind of change, and every tensor that it explains.

    Attributes:
        kind: `renamed` = other names for equal dtypes and shapes, by one pattern; `tied` = a head
            that comes or goes, and may share its data with the embedding.
        before: names in the earlier manifest.
        now: names in the later one; of renamed tensors in the order of `before`.
        text: the change in words.
    """

    kind: DifferenceKind
    before: tuple[str, ...]
    now: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def explain(before: Iterable[Described], now: Iterable[Described]) -> tuple[Difference, ...]:
    """Every difference of two manifests; the order of their tensors is none."""
    old = {meta.name: (meta.dtype, tuple(meta.shape)) for meta in before}
    new = {meta.name: (meta.dtype, tuple(meta.shape)) for meta in now}
    missing = {name: what for name, what in sorted(old.items()) if name not in new}
    extra = {name: what for name, what in sorted(new.items()) if name not in old}
    found = list(_renamed(missing, extra))
    found += _tied(missing, extra, new)
    if missing:
        names = tuple(missing)
        found.append(Difference("missing", names, (), f"missing: {_listed(names)}"))
    if extra:
        names = tuple(extra)
        found.append(Difference("extra", (), names, f"extra: {_listed(names)}"))
    both = sorted(old.keys() & new.keys())
    found += _changed("dtype", both, lambda name: (old[name][0], new[name][0]), str)
    found += _changed("shape", both, lambda name: (old[name][1], new[name][1]), _shape)
    return tuple(found)


def describe(differences: Sequence[Difference]) -> str:
    """All of them in one line."""
    return "; ".join(map(str, differences))


Specs = dict[str, tuple[str, tuple[int, ...]]]


def _renamed(missing: Specs, extra: Specs) -> Iterator[Difference]:
    """Take out of both what a pattern makes of one another; the widest pattern first."""
    for wrapper in _WRAPPERS:
        yield from _taken(missing, extra, partial(_without, wrapper), f"without {wrapper!r}")
        backwards = {name.replace(wrapper, ""): name for name in extra if wrapper in name}
        yield from _taken(missing, extra, backwards.get, f"with {wrapper!r} in it")
    while patterns := _prefixes(missing, extra):
        was, is_now = max(patterns, key=patterns.__getitem__)
        yield from _taken(
            missing,
            extra,
            partial(_moved, was, is_now),
            f"{was!r} became {is_now!r}"
            if was and is_now
            else f"without {was!r} in front"
            if was
            else f"with {is_now!r} in front",
        )


def _without(wrapper: str, name: str) -> str:
    return name.replace(wrapper, "")


def _moved(was: str, is_now: str, name: str) -> str | None:
    return is_now + name.removeprefix(was) if name.startswith(was) else None


def _taken(
    missing: Specs, extra: Specs, rename: Callable[[str], str | None], how: str
) -> Iterator[Difference]:
    pairs = [
        (name, other)
        for name, what in missing.items()
        if (other := rename(name)) is not None and extra.get(other) == what
    ]
    for name, other in pairs:
        del missing[name], extra[other]
    if pairs:
        before, now = zip(*pairs, strict=True)
        text = f"renamed, {how}: {_listed(before)}, now {now[0]!r}"
        yield Difference("renamed", before, now, text if len(now) == 1 else f"{text} and so on")


def _prefixes(missing: Specs, extra: Specs) -> Counter[tuple[str, str]]:
    """For every pair of beginnings how many names it explains that go on alike."""
    ends: dict[str, list[str]] = defaultdict(list)
    for name in extra:
        for start in _starts(name):
            ends[name[start:]].append(name)
    found: Counter[tuple[str, str]] = Counter()
    for name, what in missing.items():
        for start in _starts(name):
            rest = name[start:]
            others = [other for other in ends.get(rest, ()) if extra[other] == what]
            if start and "." not in rest:
                others = [rest] if rest in others else []  # `weight` alone says nothing
            if others:
                found.update((name[:start], other.removesuffix(rest)) for other in others)
                break
    return found


def _starts(name: str) -> list[int]:
    """Where the parts of a name begin."""
    return [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]


def _tied(missing: Specs, extra: Specs, new: Specs) -> Iterator[Difference]:
    for names, change in ((missing, "is sent no more"), (extra, "was not sent before")):
        for name in [name for name in names if name.endswith(_HEADS)]:
            twin = next(
                (n for n, what in new.items() if n.endswith(_EMBEDDINGS) and what == names[name]),
                None,
            )
            if twin is None:
                continue
            del names[name]
            text = (
                f"tied: {name!r} {change} and is like {twin!r}, with which it may share its data; "
                "a tied tensor is sent under each of its names, or always under one"
            )
            gone = names is missing
            yield Difference("tied", (name,) if gone else (), () if gone else (name,), text)


def _changed(
    kind: Literal["dtype", "shape"],
    names: Iterable[str],
    change: Callable[[str], tuple[T, T]],
    shown: Callable[[T], str],
) -> Iterator[Difference]:
    groups: dict[tuple[T, T], list[str]] = defaultdict(list)
    for name in names:
        was, is_now = change(name)
        if was != is_now:
            groups[was, is_now].append(name)
    for (was, is_now), changed in groups.items():
        text = f"{kind} was {shown(was)} and is {shown(is_now)}: {_listed(changed)}"
        yield Difference(kind, tuple(changed), tuple(changed), text)


def _shape(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def _listed(names: Sequence[str]) -> str:
    """The first few, how many there are, and under which beginning."""
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    if len(names) <= _SHOWN:
        return shown
    common = _common_start(names)
    under = f" under {common!r}" if common else ""
    return f"{len(names)} tensors{under}, {shown} and so on"


def _common_start(names: Sequence[str]) -> str:
    parts = zip(*(name.split(".") for name in names), strict=False)
    same = []
    for column in parts:
        if len(set(column)) > 1:
            break
        same.append(column[0] + ".")
    return "".join(same)
