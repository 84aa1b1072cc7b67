"""The demo does what its page promises, run as a user runs it."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from genapi.demo.__main__ import main

LIMIT_S = 45
KEYS = [
    *("steps", "final_version", "workers", "committed", "accepted", "dropped"),
    *("max_lag_accepted", "reward_first", "reward_last", "seconds"),
]
WORKER = re.compile(r"worker process (\d+) serves at")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "genapi.demo", *arguments]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def summary_of(output: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert list(summary) == KEYS
    return summary


def processes_of(progress: str) -> list[int]:
    return [int(pid) for pid in WORKER.findall(progress)]


def alive(pids: Sequence[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        found.append(pid)
    return found


def test_the_reward_rises_while_every_version_is_published() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    summary = summary_of(done.stdout)
    assert summary["steps"] == summary["committed"] == summary["final_version"] == 20
    assert summary["workers"] == 2
    assert summary["accepted"] + summary["dropped"] == 20 * 32
    assert 1 <= summary["max_lag_accepted"] <= 2
    assert summary["reward_last"] >= summary["reward_first"] + 0.2
    assert summary["seconds"] < 60
    rows = done.stdout.splitlines()[:-1]
    assert rows[0].split() == [
        *("step", "version", "reward", "accepted", "dropped", "mixed", "lag:tokens", "pause", "ms")
    ]
    assert [int(row.split()[1]) for row in rows[1:]] == list(range(20))
    assert sum(int(row.split()[5]) for row in rows[1:]) > 0  # rollouts were in flight meanwhile
    assert all(float(row.split()[-1]) > 0 for row in rows[1:])
    assert len(re.findall(r"^step .* published in .* ms", done.stderr, re.MULTILINE)) == 20


def test_without_publishing_the_same_number_of_rollouts_teaches_nothing() -> None:
    done = run("--no-publish")
    assert done.returncode == 1
    assert "the reward did not rise" in done.stderr
    summary = summary_of(done.stdout)
    assert (summary["steps"], summary["final_version"], summary["committed"]) == (20, 0, 0)
    assert (summary["accepted"], summary["dropped"]) == (20 * 32, 0)
    assert summary["max_lag_accepted"] == 19
    assert abs(summary["reward_last"] - summary["reward_first"]) < 0.1


def test_a_window_of_no_lag_drops_what_was_in_flight() -> None:
    done = run("--max-lag", "0", "--steps", "5", "--workers", "3", "--seed", "1")
    summary = summary_of(done.stdout)
    assert summary["committed"] == 5, done.stderr
    assert summary["workers"] == 3
    assert summary["dropped"] > 0
    assert summary["accepted"] + summary["dropped"] == 5 * 32
    assert summary["max_lag_accepted"] == 0


def test_workers_in_processes_serve_the_same_loop_and_none_is_left() -> None:
    done = run("--processes", "--steps", "8")
    assert done.returncode == 0, done.stderr
    pids = processes_of(done.stderr)
    assert len(set(pids)) == 2
    assert alive(pids) == []
    assert summary_of(done.stdout)["committed"] == 8


class Running:
    """A demo that runs its workers in processes."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            command("--processes"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.progress = ""

    @property
    def workers(self) -> list[int]:
        return processes_of(self.progress)

    def reach(self, beginning: str) -> None:
        """Wait for a line of progress that begins so."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.progress += line
            if line.startswith(beginning):
                return
        pytest.fail(f"it ended before {beginning!r}: {self.progress}")

    def end(self) -> str:
        """Wait for the end; returns standard output."""
        output, progress = self.process.communicate(timeout=LIMIT_S)
        self.progress += progress
        return output


@pytest.fixture
def running() -> Iterator[Running]:
    demo = Running()
    try:
        demo.reach("step  2/")
        assert len(alive(demo.workers)) == 2
        yield demo
    finally:
        demo.process.kill()
        demo.process.communicate()
        for pid in alive(demo.workers):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_a_signal_ends_it_with_what_was_done_and_leaves_no_process(
    running: Running, number: signal.Signals, status: int
) -> None:
    running.process.send_signal(number)
    running.process.send_signal(number)  # impatience changes nothing
    summary = summary_of(running.end())
    assert running.process.returncode == status
    assert alive(running.workers) == []
    assert "Traceback" not in running.progress
    assert 2 <= summary["steps"] < 20
    assert summary["accepted"] + summary["dropped"] == 32 * summary["steps"]
    assert summary["final_version"] == summary["committed"] > 0


def test_a_killed_worker_ends_it_with_a_receipt_and_leaves_no_process(running: Running) -> None:
    os.kill(running.workers[0], signal.SIGKILL)
    summary = summary_of(running.end())
    assert running.process.returncode == 1
    assert alive(running.workers) == []
    assert "FAILED: " in running.progress
    assert 2 <= summary["steps"] < 20


@pytest.fixture
def server() -> Iterator[str]:
    """An embedded worker that nobody but the demo administrates."""
    process = subprocess.Popen(
        [sys.executable, "-m", "genapi.embedded"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        yield url.replace("http://", "vllm://")
    finally:
        process.kill()
        process.communicate()


def test_given_servers_only_generate_and_are_judged_when_there_is_nothing_to_publish(
    server: str,
) -> None:
    done = run("--target", server, "--steps", "2", "--vocab", "32")
    assert done.returncode == 0, done.stderr
    assert "UNKNOWN" in done.stderr
    summary = summary_of(done.stdout)
    assert (summary["accepted"], summary["dropped"]) == (0, 64)
    assert summary["reward_first"] is summary["reward_last"] is summary["final_version"] is None
    assert (summary["workers"], summary["committed"]) == (1, 0)


def test_a_publication_that_is_refused_fails_the_run_and_says_why(
    server: str, tmp_path: pathlib.Path
) -> None:
    weights = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"weight": np.zeros(4, dtype=np.float32)}, weights)
    done = run("--target", server, "--steps", "2", "--weights", str(weights))
    assert done.returncode == 1
    assert "genapi_gloo" in done.stderr
    summary = summary_of(done.stdout)
    assert (summary["final_version"], summary["committed"]) == (0, 0)


def test_weights_that_cannot_be_read_fail_before_anything_is_contacted(
    tmp_path: pathlib.Path,
) -> None:
    missing = str(tmp_path / "none.safetensors")
    done = run("--target", "vllm://127.0.0.1:9", "--weights", missing)
    assert done.returncode == 1
    assert missing in done.stderr
    assert summary_of(done.stdout)["steps"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "0 is less than 1"),
        (["--max-lag", "-1"], "-1 is less than 0"),
        (["--seed", "x"], "invalid"),
        (["--weights", "w"], "--weights needs --target"),
        (["--vocab", "8"], "--vocab needs --target"),
        (["--target", "vllm://h:1", "--processes"], "--processes is for the embedded engine"),
        (["--target", "vllm://h:1", "--no-publish"], "--no-publish is for the embedded engine"),
        (["--target", "vllm://h:1", "--workers", "2"], "--workers is for the embedded engine"),
    ],
)
def test_a_command_line_that_cannot_be_is_refused_with_its_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
