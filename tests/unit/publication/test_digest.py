"""What both ends agree on: equal where nothing differs, different where anything does."""

from ipaddress import ip_address
from typing import Any

import pytest

from genapi.publication.digest import group_digest, plan_digest
from genapi.types.ids import WorkerId
from genapi.weights import TensorMeta

ONE, TWO = (WorkerId(provider="vllm", instance=str(i)) for i in (1, 2))
GROUP: dict[str, Any] = {
    "backend": "genapi_gloo",
    "init_info": {"master_address": "h", "master_port": 1, "world_size": 3, "packed": True},
    "offsets": {ONE: 1, TWO: 2},
}
METAS = tuple(TensorMeta(name=n, dtype="float32", shape=(2, 3)) for n in "abc")
PLAN: dict[str, Any] = {"group": "g", "manifest": METAS, "ends": (2, 3)}


def test_equal_things_have_equal_digests_in_whatever_order_they_were_written() -> None:
    turned: dict[str, Any] = {
        "backend": "genapi_gloo",
        "init_info": dict(reversed(GROUP["init_info"].items())),
        "offsets": {TWO: 2, ONE: 1},
    }
    assert group_digest(**GROUP) == group_digest(**turned)
    assert plan_digest(**PLAN) == plan_digest("g", list(METAS), [2, 3])


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "genapi_memory"},
        {"init_info": {**GROUP["init_info"], "packed": False}},
        {"init_info": {**GROUP["init_info"], "master_port": 2}},
        {"offsets": {ONE: 2, TWO: 1}},
        {"offsets": {ONE: 1, WorkerId(provider="vllm", instance="3"): 2}},
    ],
)
def test_another_worker_rank_or_wire_parameter_is_another_group(change: dict[str, Any]) -> None:
    assert group_digest(**{**GROUP, **change}) != group_digest(**GROUP)


@pytest.mark.parametrize(
    "change",
    [
        {"group": "h"},
        {"manifest": METAS[:2]},
        {"manifest": METAS[::-1]},
        {"manifest": (*METAS[:2], METAS[2].model_copy(update={"dtype": "int32"}))},
        {"manifest": (*METAS[:2], METAS[2].model_copy(update={"shape": (3, 2)}))},
        {"ends": (1, 3)},
    ],
)
def test_another_tensor_order_or_bucket_is_another_plan(change: dict[str, Any]) -> None:
    assert plan_digest(**{**PLAN, **change}) != plan_digest(**PLAN)


def test_a_wire_parameter_that_json_does_not_know_counts_by_its_text() -> None:
    here, there = (
        group_digest(
            GROUP["backend"], {"master_address": ip_address(text)}, offsets=GROUP["offsets"]
        )
        for text in ("10.0.0.1", "10.0.0.2")
    )
    assert here != there


def test_the_digest_of_a_plan_begins_with_that_of_its_group() -> None:
    assert plan_digest(**PLAN).startswith("g:")
