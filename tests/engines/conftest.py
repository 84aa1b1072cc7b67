"""What tests of real engines share: environments, tiny models, servers and a reference.

An engine's environment is named by a variable that `nox -s engines` sets; without it the tests are
skipped. Servers are kept for the whole session; a test that breaks one takes its own by `serve`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

import genapi
from tests.engines.kit.dynamo.deployment import VLLM_WORKER, Deployment, Kind
from tests.engines.kit.places import Place, Standing, of_dynamo, of_servers
from tests.engines.kit.server import VLLM, Engine, Server, serving
from tests.engines.kit.sglang.engine import SGLANG

KIT = pathlib.Path(__file__).parent / "kit"
ANSWER_LIMIT_S = 120.0
# Between the two best tokens; below it, which one comes first is up to rounding.
CLEAR_MARGIN = 1e-3


@dataclass(frozen=True)
class Models:
    """Folders of two models that differ in their weights only."""

    seed0: pathlib.Path
    seed1: pathlib.Path


@dataclass(frozen=True)
class Expected:
    """A greedy continuation and how clear each token of it was."""

    token_ids: list[int]
    logprobs: list[float]
    margins: list[float]

    def assert_said_by(self, token_ids: Sequence[int]) -> None:
        """Fail unless the ids are these, up to the first token that rounding may decide."""
        clear = [margin >= CLEAR_MARGIN for margin in self.margins]
        end = clear.index(False) if False in clear else len(clear)
        assert end > 0, "the first token is a tie: choose another prompt"
        assert list(token_ids)[:end] == self.token_ids[:end]
        assert len(token_ids) == len(self.token_ids)


Question = Mapping[str, object]
Reference = Callable[[pathlib.Path, Sequence[int], int], Expected]
Oracle = Callable[[pathlib.Path, Sequence[int], Sequence[int]], list[tuple[int, float]]]


class Serve(Protocol):
    def __call__(
        self, count: int = 1, *, flags: Sequence[str] = ()
    ) -> contextlib.AbstractContextManager[tuple[Server, ...]]: ...


class Deploy(Protocol):
    def __call__(
        self,
        kind: Kind,
        workers: Sequence[Sequence[str]] = ((),),
        *,
        frontend: Sequence[str] = (),
    ) -> contextlib.AbstractContextManager[Deployment]: ...


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring tests on the standing server of one engine together, so that it is started once."""
    tests = (item for item in items if isinstance(item, pytest.Function))
    standing = [item for item in tests if "standing" in item.fixturenames]
    ordered = iter(sorted(standing, key=lambda item: (item.path, item.callspec.params["kind"])))
    items[:] = [next(ordered) if item in standing else item for item in items]


def environment(name: str) -> pathlib.Path:
    place = os.environ.get(f"GENAPI_ENGINE_{name.upper()}")
    if place is None:
        pytest.skip(f"GENAPI_ENGINE_{name.upper()} names no environment; run `nox -s engines`")
    return pathlib.Path(place)


@pytest.fixture(scope="session")
def vllm_environment() -> pathlib.Path:
    """An environment with vLLM and genapi."""
    return environment("vllm")


@pytest.fixture(scope="session")
def sglang_environment() -> pathlib.Path:
    """An environment with SGLang."""
    return environment("sglang")


@pytest.fixture(scope="session")
def smg_environment() -> pathlib.Path:
    """An environment with SGLang's gateway."""
    return environment("smg")


@pytest.fixture(scope="session")
def dynamo_environment() -> pathlib.Path:
    """An environment with Dynamo, vLLM and genapi."""
    return environment("dynamo")


@pytest.fixture(scope="session")
def reference_environment() -> pathlib.Path:
    """An environment with `transformers`, as that of each engine is."""
    names = ("vllm", "sglang", "dynamo")
    named = (name for name in names if f"GENAPI_ENGINE_{name.upper()}" in os.environ)
    return environment(next(named, "vllm"))


@pytest.fixture(scope="session")
def torch_environment() -> pathlib.Path:
    """An environment with torch and genapi, and nothing that genapi depends on."""
    return environment("torch")


@pytest.fixture(scope="session")
def models(reference_environment: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Two tiny models."""
    root = tmp_path_factory.mktemp("models")
    python = reference_environment / "bin" / "python"
    subprocess.run([python, KIT / "models.py", root], check=True, timeout=ANSWER_LIMIT_S)
    return Models(root / "seed0", root / "seed1")


@pytest.fixture(scope="session")
def transformers(reference_environment: pathlib.Path) -> Iterator[Callable[[Question], Any]]:
    """Asks `transformers`, which runs in an engine's environment."""
    answers: queue.Queue[str] = queue.Queue()
    with subprocess.Popen(
        [reference_environment / "bin" / "python", KIT / "reference.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        questions, lines = process.stdin, process.stdout

        def read() -> None:
            for line in lines:
                answers.put(line)

        reader = threading.Thread(target=read)
        reader.start()

        def ask(question: Question) -> Any:
            questions.write(json.dumps(question) + "\n")
            questions.flush()
            return json.loads(answers.get(timeout=ANSWER_LIMIT_S))

        try:
            yield ask
        finally:
            process.kill()
            reader.join(ANSWER_LIMIT_S)


@pytest.fixture(scope="session")
def reference(transformers: Callable[[Question], Any]) -> Reference:
    """What `transformers` makes of (model folder, prompt ids, count), greedily."""

    @functools.cache
    def ask(model: pathlib.Path, prompt: tuple[int, ...], count: int) -> Expected:
        question = {"model": str(model), "prompt": prompt, "count": count}
        return Expected(**transformers(question))

    return lambda model, prompt, count: ask(model, tuple(prompt), count)


@pytest.fixture(scope="session")
def oracle(transformers: Callable[[Question], Any]) -> Oracle:
    """What `transformers` would put in the place of each of the tokens, and how clearly."""

    def ask(
        model: pathlib.Path, before: Sequence[int], tokens: Sequence[int]
    ) -> list[tuple[int, float]]:
        question = {"model": str(model), "prompt": list(before), "tokens": list(tokens)}
        answer = transformers(question)
        return list(zip(answer["best"], answer["margins"], strict=True))

    return ask


@pytest.fixture(scope="session")
def scores(transformers: Callable[[Question], Any]) -> Callable[..., list[float | None]]:
    """What `transformers` gives for the ids of a publisher's probe."""

    def ask(folder: pathlib.Path, p: genapi.WeightPublisher) -> list[float | None]:
        answer: list[float | None] = transformers(
            {"model": str(folder), "prompt": list(p.probe_ids)}
        )["logprobs"]
        return answer

    return ask


def serve_by(
    engine: Engine,
    place: pathlib.Path,
    models: Models,
    tmp_path_factory: pytest.TempPathFactory,
) -> Serve:
    def start(
        count: int = 1, *, flags: Sequence[str] = ()
    ) -> contextlib.AbstractContextManager[tuple[Server, ...]]:
        folder = tmp_path_factory.mktemp(engine.scheme)
        return serving(place, models.seed0, count=count, folder=folder, flags=flags, engine=engine)

    return start


@pytest.fixture(scope="session")
def serve(
    vllm_environment: pathlib.Path, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Serve:
    """`with serve(count, flags=[...]) as servers:` for servers of seed 0 of one's own."""
    return serve_by(VLLM, vllm_environment, models, tmp_path_factory)


@pytest.fixture(scope="session")
def serve_sglang(
    sglang_environment: pathlib.Path, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Serve:
    """The same for SGLang."""
    return serve_by(SGLANG, sglang_environment, models, tmp_path_factory)


@pytest.fixture(scope="session")
def deploy(
    dynamo_environment: pathlib.Path, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Deploy:
    """`with deploy(kind, [flags, flags]) as deployment:` for a frontend and workers of seed 0."""

    @contextlib.contextmanager
    def start(
        kind: Kind, workers: Sequence[Sequence[str]] = ((),), *, frontend: Sequence[str] = ()
    ) -> Iterator[Deployment]:
        folder = tmp_path_factory.mktemp("dynamo")
        with Deployment(dynamo_environment, models.seed0, folder, flags=frontend) as deployment:
            for flags in workers:
                deployment.start(kind, *flags)
            deployment.wait()
            yield deployment

    return start


@pytest.fixture(scope="session")
def vllm_pair(serve: Serve) -> Iterator[tuple[Server, Server]]:
    """Two servers of seed 0, for tests that leave them serving seed 0, resumed."""
    with serve(2) as (first, second):
        yield first, second


@pytest.fixture(scope="session")
def sglang_pair(serve_sglang: Serve) -> Iterator[tuple[Server, Server]]:
    """Two servers of seed 0, for tests that leave them serving seed 0, resumed."""
    with serve_sglang(2) as (first, second):
        yield first, second


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    """The engine of a test, where the same is said of several."""
    return str(request.param)


@pytest.fixture(scope="module")
def standing(kind: str, request: pytest.FixtureRequest) -> Iterator[Standing]:
    """Servers of that engine."""
    if kind == "dynamo":
        with request.getfixturevalue("deploy")(VLLM_WORKER) as deployment:
            yield of_dynamo(deployment)
    else:
        serve = request.getfixturevalue({"vllm": "serve", "sglang": "serve_sglang"}[kind])
        with of_servers(serve) as servers:
            yield servers


@pytest.fixture
def alone(standing: Standing) -> Place:
    """One server; a test leaves it serving."""
    return standing.alone()


@pytest.fixture
def own(standing: Standing) -> Iterator[Place]:
    """One server that a test may ruin."""
    with standing.own() as place:
        yield place
