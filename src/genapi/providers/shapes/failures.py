"""Failures that a body with status 200 reports.

The rule of this file: whoever asked for something that changes a worker asks here whether it was
done. What a failure proves is the provider's.
"""

from collections.abc import Mapping
from typing import Any

__all__ = ("reports_failure",)

_FAILED = ("error", "failed")  # engines that did it say "paused", "resumed", "ok"


def reports_failure(body: Mapping[str, Any]) -> bool:
    """Whether it names an error, no success, or a status that is one."""
    failed = bool(body.get("error")) or body.get("success") is False
    return failed or body.get("status") in _FAILED
