"""Cases of the contract suite as parameters, marked with the public reports that they are about."""

from collections.abc import Iterable
from typing import Any

import pytest

from genapi.testing.contract import Case
from tests.conftest import is_case_id

__all__ = ("marked",)


def marked(cases: Iterable[Case]) -> list[Any]:
    """One parameter for each case."""
    return [
        pytest.param(
            case,
            id=str(case),
            marks=[pytest.mark.case(case.behaviour.source)]
            if is_case_id(case.behaviour.source)
            else [],
        )
        for case in cases
    ]
