"""What holds whatever an engine does is said once, beside the rules and not by each provider."""

from collections.abc import Sequence

import pytest

from genapi.providers.dynamo import files as dynamo_files
from genapi.providers.dynamo import verdicts as dynamo
from genapi.providers.sglang import files as sglang_files
from genapi.providers.sglang import verdicts as sglang
from genapi.providers.vllm import files as vllm_files
from genapi.providers.vllm import verdicts as vllm
from genapi.publication.evidence import Row
from genapi.publication.rules import FILE_RULES, LABEL_RULES, RULES

TABLES = [
    vllm.ROWS,
    vllm_files.ROWS,
    sglang.ROWS,
    sglang_files.ROWS,
    dynamo.ROWS,
    dynamo_files.ROWS,
]


@pytest.mark.parametrize("rows", TABLES)
def test_a_provider_s_own_rows_are_claims_about_its_engine(rows: Sequence[Row]) -> None:
    own = [row for row in rows if row not in FILE_RULES]
    assert own
    assert [row for row in own if row.source.startswith("RULE")] == []


@pytest.mark.parametrize("rows", [RULES, LABEL_RULES, FILE_RULES])
def test_a_rule_claims_nothing_about_an_engine(rows: Sequence[Row]) -> None:
    assert [row for row in rows if not row.source.startswith("RULE: ")] == []


def test_what_is_said_of_every_engine_alike_is_a_rule() -> None:
    everywhere = set(TABLES[0]).intersection(*TABLES[1:])
    assert everywhere == set(RULES)
