"""How a manifest differs from the one before: told by name and by pattern."""

import pytest

from genapi.publication.manifest import describe, explain
from genapi.weights import TensorMeta

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)
EMBEDDING, HEAD = NAMES[0], NAMES[-1]


def meta(name: str, *, dtype: str = "bfloat16", shape: tuple[int, ...] | None = None) -> TensorMeta:
    sizes = {EMBEDDING: (64, 8), HEAD: (64, 8), "model.norm.weight": (8,)}
    return TensorMeta(name=name, dtype=dtype, shape=shape or sizes.get(name, (8, 8)))


BEFORE = tuple(map(meta, NAMES))


def renamed(rename: dict[str, str]) -> tuple[TensorMeta, ...]:
    return tuple(m.model_copy(update={"name": rename.get(m.name, m.name)}) for m in BEFORE)


def test_equal_manifests_do_not_differ_in_whatever_order() -> None:
    assert explain(BEFORE, reversed(BEFORE)) == ()


def test_a_layer_that_is_missing_is_told_by_its_names() -> None:
    now = [m for m in BEFORE if not m.name.startswith("model.layers.1.")]
    (found,) = explain(BEFORE, now)
    assert (found.kind, found.before, found.now) == ("missing", (NAMES[4], NAMES[3]), ())
    assert NAMES[3] in found.text


def test_many_names_are_told_by_their_number_and_their_common_beginning() -> None:
    before = [*BEFORE, *(meta(f"model.layers.2.experts.{i}.w.weight") for i in range(40))]
    (found,) = explain(before, BEFORE)
    assert found.text.startswith("missing: 40 tensors under 'model.layers.2.experts.', ")
    assert len(found.before) == 40
    assert len(found.text) < 250


def test_a_tensor_more_than_before_is_extra() -> None:
    (found,) = explain(BEFORE, [*BEFORE, meta("model.rotary.inv_freq", shape=(4,))])
    assert str(found) == "extra: 'model.rotary.inv_freq'"
    assert (found.kind, found.before, found.now) == ("extra", (), ("model.rotary.inv_freq",))


def test_what_explains_most_names_is_told_first() -> None:
    before = [meta("m.v"), meta("m.w")]
    now = [meta("z.m.w"), meta("a.m.v"), meta("a.m.w")]
    assert list(map(str, explain(before, now))) == [
        "renamed, with 'a.' in front: 'm.v', 'm.w', now 'a.m.v' and so on",
        "extra: 'z.m.w'",
    ]


@pytest.mark.parametrize(
    ("was", "is_now", "told"),
    [
        ("model.", "actor.", "renamed, 'model.' became 'actor.': 'model.n.w', now 'actor.n.w'"),
        ("model.", "", "renamed, without 'model.' in front: 'model.n.w', now 'n.w'"),
        ("", "actor.", "renamed, with 'actor.' in front: 'n.w', now 'actor.n.w'"),
    ],
)
def test_a_new_beginning_is_told_beside_the_old_one(was: str, is_now: str, told: str) -> None:
    (found,) = explain([meta(was + "n.w")], [meta(is_now + "n.w")])
    assert str(found) == told


def test_a_last_part_alone_says_nothing_unless_it_is_the_whole_name() -> None:
    (found,) = explain([meta("m.w")], [meta("w")])
    assert str(found) == "renamed, without 'm.' in front: 'm.w', now 'w'"
    assert [d.kind for d in explain([meta("m.w")], [meta("x.w")])] == ["missing", "extra"]


def test_names_of_different_depths_are_told_together() -> None:
    (found,) = explain([meta(name) for name in ("a.b", "a.b.c", "a.b.d", "a.b.e.f")], [])
    assert str(found).startswith("missing: 4 tensors under 'a.b.', 'a.b', ")


def test_a_few_names_are_all_told() -> None:
    (found,) = explain([meta(f"n{i}.w") for i in range(3)], [])
    assert str(found) == "missing: 'n0.w', 'n1.w', 'n2.w'"


def test_a_name_that_does_not_begin_like_the_others_is_told_apart_from_them() -> None:
    before = [meta("model.a.w"), meta("model.b.w"), meta("x.v")]
    now = [meta("actor.a.w"), meta("actor.b.w"), meta("actor.x.v")]
    assert [(d.before, d.now) for d in explain(before, now)] == [
        (("model.a.w", "model.b.w"), ("actor.a.w", "actor.b.w")),
        (("x.v",), ("actor.x.v",)),
    ]


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_fsdp_wrapped_module."])
def test_a_wrapper_of_the_module_is_one_pattern(wrapper: str) -> None:
    now = renamed({name: wrapper + name for name in NAMES})
    (found,) = explain(BEFORE, now)
    assert found.kind == "renamed"
    assert found.text.startswith(f"renamed, with {wrapper!r} in it: 7 tensors")
    (back,) = explain(now, BEFORE)
    assert back.text.startswith(f"renamed, without {wrapper!r}: 7 tensors")
    assert set(zip(back.now, back.before, strict=True)) == set(
        zip(found.before, found.now, strict=True)
    )


def test_a_wrapper_in_the_middle_of_names_is_one_pattern() -> None:
    inside = {n: n.replace("layers.", "layers._fsdp_wrapped_module.") for n in NAMES}
    (found,) = explain(BEFORE, renamed(inside))
    assert found.kind == "renamed"
    assert len(found.before) == 4


def test_another_beginning_is_one_pattern_and_the_rest_is_left_alone() -> None:
    moved = {n: n.replace("model.", "language_model.", 1) for n in NAMES if n != HEAD}
    (found,) = explain(BEFORE, renamed(moved))
    assert (found.kind, len(found.before)) == ("renamed", 6)
    assert "'model.' became 'language_model.'" in found.text


def test_a_name_with_another_shape_is_no_renaming() -> None:
    now = [m if m.name != NAMES[2] else meta("model.layers.9.mlp.up_proj.weight", shape=(4, 4))
           for m in BEFORE]  # fmt: skip
    assert [d.kind for d in explain(BEFORE, now)] == ["missing", "extra"]


def test_a_head_that_comes_or_goes_may_be_tied_to_the_embedding() -> None:
    without = [m for m in BEFORE if m.name != HEAD]
    (gone,) = explain(BEFORE, without)
    assert (gone.kind, gone.before, gone.now) == ("tied", (HEAD,), ())
    tied = (
        "and is like 'model.embed_tokens.weight', with which it may share its data; a tied tensor "
        "is sent under each of its names, or always under one"
    )
    assert gone.text == f"tied: 'lm_head.weight' is sent no more {tied}"
    (come,) = explain(without, BEFORE)
    assert (come.kind, come.before, come.now) == ("tied", (), (HEAD,))
    assert come.text == f"tied: 'lm_head.weight' was not sent before {tied}"


def test_of_two_heads_each_is_held_against_the_embedding() -> None:
    draft = meta("draft." + HEAD, shape=(64, 16))
    tied, missing = explain([*BEFORE, draft], [m for m in BEFORE if m.name != HEAD])
    assert (tied.kind, tied.before) == ("tied", (HEAD,))
    assert (missing.kind, missing.before) == ("missing", (draft.name,))


def test_a_head_of_another_shape_than_the_embedding_is_just_missing() -> None:
    before = [*BEFORE[:-1], meta(HEAD, shape=(64, 16))]
    (gone,) = explain(before, BEFORE[:-1])
    assert gone.kind == "missing"


def test_dtypes_and_shapes_are_told_by_what_they_were_and_are() -> None:
    now = [meta(m.name, dtype="float32") for m in BEFORE]
    now[0] = meta(EMBEDDING, dtype="float32", shape=(128, 8))
    dtype, shape = explain(BEFORE, now)
    assert (dtype.kind, len(dtype.now)) == ("dtype", 7)
    assert dtype.before == dtype.now
    assert (shape.before, shape.now) == ((EMBEDDING,), (EMBEDDING,))
    assert dtype.text.startswith("dtype was bfloat16 and is float32: 7 tensors, ")
    assert str(shape) == f"shape was [64, 8] and is [128, 8]: {EMBEDDING!r}"
    assert describe((dtype, shape)) == f"{dtype}; {shape}"
