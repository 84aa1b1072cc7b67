"""The socket shell: a process of its own that listens, hangs up, dies and stops like a server."""

import base64
import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from genapi.embedded import policy

GENERATE = "/inference/v1/generate"
LIMIT_S = 10


class Server:
    """A running process and how to call it."""

    def __init__(self, process: subprocess.Popen[str], facts: dict[str, Any]) -> None:
        self.process = process
        self.facts = facts
        self.address = urlsplit(facts["url"]).netloc

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, timeout=LIMIT_S)

    def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        with_body = b"" if body is None else json.dumps(body).encode()
        connection = self.connect()
        try:
            connection.request(method, path, with_body, {"content-type": "application/json"})
            reply = connection.getresponse()
            raw = reply.read()
        finally:
            connection.close()
        try:
            return reply.status, json.loads(raw)
        except ValueError:
            return reply.status, raw.decode()


@contextmanager
def started(*options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "genapi.embedded", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Server(process, json.loads(process.stdout.readline()))
        finally:
            process.kill()


def test_a_deployment_is_one_process_with_a_port_for_each_address() -> None:
    options = ("--protocol", "dynamo", "--workers", "3", "--prefill", "1", "--seed", "1")
    with started(*options) as running:
        frontend, discovery, *workers = running.facts["urls"]
        assert running.facts["url"] == frontend
        assert running.call("GET", "/v1/models")[1]["data"][0]["id"] == "tiny"
        running.address = urlsplit(discovery).netloc
        listed = running.call("GET", "/v1/rl/workers")[1]["workers"]
        assert sorted(w["system_url"] for w in listed) == sorted(workers)
        running.address = urlsplit(workers[0]).netloc
        status, body = running.call("POST", "/engine/get_weight_version", {})
        assert (status, body["version_declared"]) == (200, False)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(LIMIT_S) == -signal.SIGTERM


def test_a_process_of_one_worker_takes_no_number_of_workers() -> None:
    command = [sys.executable, "-m", "genapi.embedded", "--workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert "workers='2': this process is one worker" in done.stderr


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with started("--seed", "1", "--max-model-len", "2000", "--step-s", "0.001") as running:
        yield running


@pytest.fixture
def sglang() -> Iterator[Server]:
    with started("--protocol", "sglang", "--seed", "1", "--max-model-len", "4000") as running:
        yield running


def asked(n: int, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": n, "temperature": 0}
    return {"input_ids": [1, 2, 3], "sampling_params": sampling} | fields


def body(n: int, **fields: Any) -> dict[str, Any]:
    sampling = {"max_tokens": n, "temperature": 0}
    return {"token_ids": [1, 2, 3], "sampling_params": sampling} | fields


def test_it_says_where_it_listens(server: Server) -> None:
    assert server.facts["pid"] == server.process.pid
    assert server.call("GET", "/health") == (200, "")
    _, info = server.call("GET", "/server_info?config_format=json")
    assert info["vllm_config"]["instance_id"] == server.facts["instance_id"]


def test_it_generates_whole_and_in_pieces(server: Server) -> None:
    expected = policy.greedy(policy.init(1), [1, 2, 3], 8)
    status, reply = server.call("POST", GENERATE, body(8))
    assert (status, reply["choices"][0]["token_ids"]) == (200, expected)
    status, text = server.call("POST", GENERATE, body(8, stream=True))
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    choices = [c for line in lines for c in json.loads(line)["choices"]]
    assert [token for c in choices for token in c["token_ids"]] == expected


def test_it_hangs_up_after_a_failed_admin_call(server: Server) -> None:
    """Without having said so in a header."""
    connection = server.connect()
    connection.request("POST", "/finish_weight_update")
    reply = connection.getresponse()
    reply.read()
    assert (reply.status, reply.getheader("connection")) == (500, None)
    assert connection.sock.recv(1) == b""
    connection.close()


def test_a_client_that_leaves_aborts_its_request(server: Server) -> None:
    connection = server.connect()
    headers = {"content-type": "application/json"}
    connection.request("POST", GENERATE, json.dumps(body(1900, stream=True)), headers)
    reply = connection.getresponse()
    assert reply.readline().startswith(b"data: ")
    reply.close()
    connection.close()
    # a request that still ran would be aborted here, and counted
    server.call("POST", "/pause?mode=keep")
    assert server.call("POST", "/abort_requests", {}) == (200, {"status": "aborted", "aborted": 0})
    server.call("POST", "/resume")


def test_a_dead_engine_takes_its_process_along(tmp_path: Path) -> None:
    port_file = tmp_path / "port"
    with started("--exit-s", "0.2", "--port-file", str(port_file)) as server:
        assert server.address.endswith(f":{port_file.read_text().strip()}")
        server.call("POST", "/start_weight_update")
        status, reply = server.call("POST", GENERATE, body(2))
        assert status == 500
        assert reply["error"]["message"].startswith("EngineCore encountered an issue")
        assert server.process.wait(LIMIT_S) == 1
        with pytest.raises(ConnectionRefusedError):
            server.call("GET", "/health")


def test_faults_reach_the_connection_and_a_signal_stops_it() -> None:
    faults = [
        {"path": "/update_weight_version", "action": "lose_reply"},
        {"path": "/health", "action": "refuse"},
    ]
    with started("--faults", json.dumps(faults)) as server:
        for method, path in (("POST", "/update_weight_version"), ("GET", "/health")):
            with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
                server.call(method, path, {"new_version": "moved"})
        assert server.call("GET", "/weight_info") == (200, {"weight_version": "moved"})
        server.call("POST", "/pause?mode=keep")
        outcome: list[BaseException] = []

        def wait_for_ever() -> None:
            try:
                server.call("POST", GENERATE, body(4))
            except (OSError, http.client.HTTPException) as error:
                outcome.append(error)

        waiting = threading.Thread(target=wait_for_ever)
        waiting.start()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(LIMIT_S)
        waiting.join(LIMIT_S)
        assert len(outcome) == 1


def test_sglang_generates_whole_and_in_pieces(sglang: Server) -> None:
    expected = policy.greedy(policy.init(1), [1, 2, 3], 8)
    assert sglang.call("GET", "/ready") == (200, "")
    status, reply = sglang.call("POST", "/generate", asked(8))
    assert (status, reply["output_ids"]) == (200, expected)
    status, text = sglang.call("POST", "/generate", asked(8, stream=True))
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    assert json.loads(lines[-1])["output_ids"] == expected


def test_sglang_takes_weights_in_the_call_and_drops_a_client_that_left(sglang: Server) -> None:
    connection = sglang.connect()
    headers = {"content-type": "application/json"}
    connection.request("POST", "/generate", json.dumps(asked(3900, stream=True)), headers)
    assert connection.getresponse().readline().startswith(b"data: ")
    connection.close()
    weights = policy.init(2)
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    update = {
        "names": list(weights),
        "dtypes": ["float32"] * len(weights),
        "shapes": [array.shape for array in weights.values()],
        "data": [base64.b64encode(array.tobytes()).decode() for array in weights.values()],
        "weight_version": "v1",
    }
    # the server is not paused: the session waits until nobody is left
    for path, fields in (
        ("/init_weights_update_group", group | {"backend": "genapi_memory"}),
        ("/begin_weight_update", {}),
        ("/update_weights_from_distributed", update),
        ("/end_weight_update", {}),
    ):
        status, reply = sglang.call("POST", path, fields)
        assert (status, reply["success"]) == (200, True)
    _, reply = sglang.call("POST", "/generate", asked(8))
    assert reply["output_ids"] == policy.greedy(weights, [1, 2, 3], 8)
    assert reply["meta_info"]["weight_version"] == "v1"


def test_sglang_dies_of_an_id_out_of_vocabulary(sglang: Server) -> None:
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        sglang.call("POST", "/generate", asked(2, input_ids=[99]))
    assert sglang.process.wait(LIMIT_S) == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--protocol", "sglang", "--block-size", "4"),
        ("--protocol", "sglang", "--logprobs-mode", "processed_logprobs"),
        ("--protocol", "vllm", "--logprobs-mode", "scaled_logprobs"),
    ],
)
def test_what_an_engine_does_not_have_is_refused(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "genapi.embedded", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert options[2][2:].replace("-", "_") in done.stderr


def test_unknown_options_are_refused() -> None:
    command = [sys.executable, "-m", "genapi.embedded", "--bogus", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert "bogus" in done.stderr


@pytest.mark.parametrize("lacking", ["uvicorn", "httptools"])
def test_without_its_extra_the_program_says_so_in_one_line(lacking: str) -> None:
    program = (
        f"import runpy, sys; sys.modules[{lacking!r}] = None; sys.argv = ['embedded']; "
        "runpy.run_module('genapi.embedded', run_name='__main__')"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    wanted = f"needs {lacking}: install genapi with its extra 'embedded'\n"
    assert (done.returncode, done.stderr) == (2, f"python -m genapi.embedded {wanted}")
