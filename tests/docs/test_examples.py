"""Every Python example of the README and of the docs runs, as it is written.

A page is one program: its `python` fences run in order and share their names. `await`,
`async with` and `async for` may stand at the top level; each fence has an event loop of its own.
Each can be pasted line by line into `python -m asyncio`, those that are not run here as well: a
blank line ends a block there, so that none stands within one and one follows each.
An example that cannot run here says why in the page's source, on a line of its own before it:

    <!-- skip: next "needs a vLLM server" -->
"""

import ast
import asyncio
import codeop
import inspect
import pathlib
import re
import unittest

import pytest
import sybil
from sybil.parsers.markdown import CodeBlockParser, SkipParser

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if "changelog.d" not in page.parts
)
FENCE = re.compile(r"^\s*(?:```|~~~)[ \t]*(\S[^\n]*)$", re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SKIP = re.compile(r"<!-+ *skip:[^\n]*")
REASONED_SKIP = re.compile(r'<!-+ *skip: next "[^"\n]{8,}" *-+>')


def run_fence(example: sybil.Example) -> None:
    """Run one fence; line numbers in tracebacks are those of the page."""
    source = "\n" * (example.line + example.parsed.line_offset) + example.parsed
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(source, example.path, "exec", flags=flags, dont_inherit=True)
    result = eval(code, example.namespace)  # noqa: S307 - the code is ours, from the checkout
    if inspect.iscoroutine(result):
        asyncio.run(result)


def examples_of(page: pathlib.Path) -> sybil.Document:
    return sybil.Document.parse(str(page), CodeBlockParser("python", run_fence), SkipParser())


def paste(source: str) -> None:
    """Compile as `python -m asyncio` does what is pasted into it.

    Raises:
        SyntaxError: it reads a statement's end where there is none, or none where there is one.
    """
    compiler = codeop.CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    waiting: list[str] = []
    for line in [*source.splitlines(), ""]:
        waiting.append(line)
        if compiler("\n".join(waiting), "<pasted>", "single") is not None:
            waiting.clear()
    if waiting:
        raise SyntaxError(f"no end: {waiting}")


def page_id(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_examples_of_a_page_run_in_order(
    page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for example in examples_of(page):
        try:
            example.evaluate()
        except unittest.SkipTest:
            continue


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_no_example_escapes_by_an_unusual_fence_or_a_skip_without_a_reason(
    page: pathlib.Path,
) -> None:
    text = page.read_text(encoding="utf-8")
    languages = {info.strip() for info in FENCE.findall(text)}
    assert {info for info in languages if info.lower().startswith("py")} <= {"python"}
    assert [skip for skip in SKIP.findall(text) if not REASONED_SKIP.match(skip)] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_example_of_a_page_can_be_pasted_line_by_line(page: pathlib.Path) -> None:
    for fence in PYTHON.finditer(page.read_text(encoding="utf-8")):
        paste(fence[1])


@pytest.mark.parametrize(
    "source",
    [
        "if True:\n    a = 1\n\n    b = 2\n",
        "async with a:\n    b = 1\nassert b\n",
        "a = [\n    1,\n",
    ],
    ids=["a blank line within a block", "no blank line after a block", "no end"],
)
def test_what_cannot_be_pasted_is_refused(source: str) -> None:
    with pytest.raises(SyntaxError):
        paste(source)


def test_an_example_may_await_at_the_top_level_and_a_failing_one_names_its_line(
    tmp_path: pathlib.Path,
) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n```python\nimport asyncio\nawait asyncio.sleep(0)\ndone = True\n```\n\n"
        "```python\nassert done\nassert not done, 'here'\n```\n",
        encoding="utf-8",
    )
    first, second = examples_of(page)
    first.evaluate()
    with pytest.raises(AssertionError, match="here") as caught:
        second.evaluate()
    assert caught.traceback[-1].lineno + 1 == 11
