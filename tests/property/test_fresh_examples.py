"""The properties of the codecs once more, on a few examples that no run had before.

The test command runs properties on fixed examples, so that it fails or passes for everybody. What
comes from outside deserves more. A failure prints the `@reproduce_failure` line that repeats it.
"""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CODECS = ("test_sse.py", "test_vllm_codec.py", "test_sglang_codec.py")


@pytest.mark.timeout(180)
def test_the_codecs_hold_on_fresh_examples() -> None:
    files = [str(pathlib.Path("tests", "property", name)) for name in CODECS]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**os.environ, "HYPOTHESIS_PROFILE": "fresh"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
