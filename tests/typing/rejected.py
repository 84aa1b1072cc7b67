"""Calls that mypy has to refuse, read by mypy and never run.

Each line carries the error it has to raise; an ignore that ignores nothing fails the check.
"""

import genapi
from genapi import GenerateRequest, OffPolicyWindow, SamplingParams

GenerateRequest(prompt_token_ids=[1.5], sampling=SamplingParams(max_tokens=1))  # type: ignore[list-item]
GenerateRequest(prompt=b"text", sampling=SamplingParams(max_tokens=1))  # type: ignore[arg-type]
OffPolicyWindow(max_lag=2, on_stale="ignore")  # type: ignore[arg-type]
genapi.connect(8000)  # type: ignore[arg-type]
genapi.no_such_name  # type: ignore[attr-defined]
