"""Explaining manifests: whatever differs is told, once, and nothing else is."""

import random

from hypothesis import given
from hypothesis import strategies as st

from genapi.publication.manifest import Difference, explain
from genapi.weights import TensorMeta

PARTS = st.sampled_from(["model", "layers", "0", "1", "mlp", "module", "lm_head", "weight", "bias"])
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join)
METAS = st.builds(
    TensorMeta,
    name=NAMES,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    shape=st.sampled_from([(2,), (2, 2), (4, 2)]),
)
MANIFESTS = st.lists(METAS, max_size=12, unique_by=lambda meta: meta.name)


def names(metas: list[TensorMeta]) -> set[str]:
    return {meta.name for meta in metas}


def told(differences: tuple[Difference, ...], *, side: str) -> list[str]:
    """Names of the one side that only it has, as often as they are told."""
    kinds = ("missing", "extra", "renamed", "tied")
    return sorted(
        name for found in differences if found.kind in kinds for name in getattr(found, side)
    )


@given(before=MANIFESTS, now=MANIFESTS)
def test_every_name_that_only_one_has_is_told_exactly_once(
    before: list[TensorMeta], now: list[TensorMeta]
) -> None:
    found = explain(before, now)
    assert told(found, side="before") == sorted(names(before) - names(now))
    assert told(found, side="now") == sorted(names(now) - names(before))


@given(before=MANIFESTS, now=MANIFESTS)
def test_every_dtype_and_shape_that_changed_is_told_exactly_once(
    before: list[TensorMeta], now: list[TensorMeta]
) -> None:
    found = explain(before, now)
    old = {meta.name: meta for meta in before}
    both = [(old[meta.name], meta) for meta in now if meta.name in old]
    for kind in ("dtype", "shape"):
        changed = sorted(n.name for o, n in both if getattr(o, kind) != getattr(n, kind))
        assert sorted(name for d in found if d.kind == kind for name in d.now) == changed


@given(before=MANIFESTS, now=MANIFESTS)
def test_what_is_called_renamed_has_the_same_dtype_and_shape(
    before: list[TensorMeta], now: list[TensorMeta]
) -> None:
    old = {meta.name: (meta.dtype, meta.shape) for meta in before}
    new = {meta.name: (meta.dtype, meta.shape) for meta in now}
    for found in explain(before, now):
        if found.kind == "renamed":
            assert len(found.before) == len(found.now)
            for was, is_now in zip(found.before, found.now, strict=True):
                assert old[was] == new[is_now]


@given(manifest=MANIFESTS, order=st.randoms())
def test_the_order_of_tensors_makes_no_difference(
    manifest: list[TensorMeta], order: random.Random
) -> None:
    shuffled = list(manifest)
    order.shuffle(shuffled)
    assert explain(manifest, shuffled) == ()


@given(manifest=MANIFESTS.filter(bool), prefix=st.sampled_from(["actor.", "a.b.", "policy_model."]))
def test_one_beginning_more_is_one_difference(manifest: list[TensorMeta], prefix: str) -> None:
    now = [meta.model_copy(update={"name": prefix + meta.name}) for meta in manifest]
    (found,) = explain(manifest, now)
    assert found.kind == "renamed"
    assert names(manifest) == set(found.before)
