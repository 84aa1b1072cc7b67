"""For the tests of programs and providers: the contract suite (`genapi.testing.contract`).

Needs the extra `testing`, which brings pytest.
"""

import pytest

__all__ = ()

pytest.register_assert_rewrite("genapi.testing.contract")
