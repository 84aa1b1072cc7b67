"""What can be run on a checkout, and in which environment.

Plain `nox` is the whole test command: lint, types, architecture, tests, docs. There are two
environments, both made by this interpreter's own venv and pip (pip's configuration is how a CPU
build of torch is found), and both pinned by requirements/dev.txt:

    .nox/dev    every default session; genapi editable with its extras, torch, the tools
    .nox/demo   the demo: genapi and what it runs on, no torch

An environment is rebuilt when what it was made from has changed, and left alone otherwise.
Real engines live in environments of their own, outside the checkout; see tests/engines.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib

import nox

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from tests.engines.kit import drift as releases

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "none"
nox.options.error_on_external_run = False
nox.options.sessions = ["lint", "types", "architecture", "tests", "docs"]

ROOT = pathlib.Path(__file__).parent
PINS = ROOT / "requirements" / "dev.txt"
TOOLS = ROOT / "requirements" / "dev.in"

NO_TORCH = """\
no CPU build of torch was found for this Python.

The tests need torch, pinned in requirements/dev.txt; on Linux the pin names the CPU build, so
that pip stops here instead of fetching gigabytes of CUDA libraries. Tell pip where a CPU build
is, then run the same command again:
    PIP_FIND_LINKS=<directory that holds the wheel>          or
    PIP_EXTRA_INDEX_URL=<PyTorch's own index of CPU builds>  or the same in pip's configuration.
"""


class BrokenEnvironmentError(Exception):
    """An environment could not be made, or holds what it must not."""


def call(*command: str, remedy: str) -> None:
    """Run a command; raise with the remedy when it fails."""
    if subprocess.run(command, check=False).returncode:
        raise BrokenEnvironmentError(f"{' '.join(command)!r} failed: {remedy}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """One virtual environment: how it is made, and whether it is still what it should be."""

    name: str
    extras: tuple[str, ...] = ()
    torch: bool = False
    tools: bool = False
    also: tuple[str, ...] = ()
    limit_mb: int

    @property
    def path(self) -> pathlib.Path:
        """Where the environment is."""
        return ROOT / ".nox" / self.name

    def program(self, name: str) -> str:
        """The path of one of the environment's programs."""
        return str(self.path / "bin" / name)

    def prepare(self) -> None:
        """Make the environment unless it stands as it should; raise if it cannot be made."""
        stamp = self.path / ".made-from"
        if stamp.is_file() and stamp.read_text() == self._made_from():
            return
        print(f"nox > making {self.path.relative_to(ROOT)}; this takes a few minutes", flush=True)
        call(sys.executable, "-m", "venv", "--clear", str(self.path), remedy="install venv")
        if self.torch:
            self._pip("install", "-c", str(PINS), "torch", remedy=NO_TORCH)
        pinned = ("-r", str(PINS)) if self.tools else ("-c", str(PINS))
        self._pip("install", *pinned, *self.also, "-e", f"{ROOT}[{','.join(self.extras)}]")
        self._inspect()
        stamp.write_text(self._made_from())

    def _made_from(self) -> str:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        inputs = (project["project"], project["build-system"], sys.version, str(ROOT), self)
        return hashlib.sha256(repr(inputs).encode() + PINS.read_bytes()).hexdigest()

    def _pip(self, *arguments: str, remedy: str = "see pip's message above") -> None:
        pip = (self.program("python"), "-m", "pip", "--disable-pip-version-check")
        call(*pip, arguments[0], "--quiet", *arguments[1:], remedy=remedy)

    def _inspect(self) -> None:
        size = size_mb(self.path)
        print(f"nox > {self.path.relative_to(ROOT)} holds {size} MB", flush=True)
        if size > self.limit_mb:
            raise BrokenEnvironmentError(
                f"{self.path} holds {size} MB, more than {self.limit_mb}: look for a CUDA stack"
            )
        if self.torch:
            refuse_cuda(self.program("python"))


DEV = Environment(
    name="dev",
    extras=("embedded", "redis", "testing", "torch"),
    torch=True,
    tools=True,
    limit_mb=2500,
)
MUTATION = dataclasses.replace(DEV, name="mutation", also=("mutmut==3.8.1",))
DEMO = Environment(name="demo", extras=("embedded",), limit_mb=400)
MUTATED = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = ["src/genapi/publication/*.py", "src/genapi/offpolicy.py", "src/genapi/wire/*.py"]
pytest_add_cli_args = ["-p", "no:randomly", "-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = [
    "tests/unit/publication", "tests/unit/types", "tests/unit/providers",
    "tests/unit/test_control.py", "tests/unit/test_offpolicy.py",
    "tests/unit/test_wire_addresses.py",
    "tests/unit/test_wire_http.py", "tests/unit/test_wire_retry.py", "tests/unit/test_wire_sse.py",
    "tests/property/test_intervals.py",
    "tests/property/test_sse.py", "tests/property/test_transaction.py", "tests/explore",
    "-k",
    "not (two_workers or two_groups or two_publishers or superseded or leaves_out or every_order)",
]
"""  # what is mutated, and the quick tests that have to notice
# The first has torch alone: what engine_side may count on. The last has none: it is a gateway.
ENGINES = ("torch", "vllm", "sglang", "dynamo", "smg")


MOST_ROUNDS = 5  # of installing what another release asks for, which asks for more in turn


def size_mb(place: pathlib.Path) -> int:
    """How many megabytes the files of an environment take."""
    files = (entry for entry in place.rglob("*") if not entry.is_symlink())
    return sum(entry.stat().st_size for entry in files if entry.is_file()) // 10**6


def refuse_cuda(python: str) -> None:
    """Raise when an environment's torch is a CUDA build."""
    cuda_free = "import sys, torch; sys.exit(torch.version.cuda is not None)"
    call(python, "-c", cuda_free, remedy="torch is a CUDA build")


def fill_engine_environment(
    name: str, place: pathlib.Path, pip: tuple[str, ...], lists: list[pathlib.Path]
) -> None:
    """Install what an engine's folder of tests/engines/kit lists."""
    print(f"nox > making {place}; this takes a few minutes", flush=True)
    call(sys.executable, "-m", "venv", "--clear", str(place), remedy="install venv")
    needs_torch = name != "smg"
    if needs_torch:
        call(*pip, "install", "-c", str(PINS), "torch", remedy=NO_TORCH)
    for path in lists:
        alone = ("--no-deps",) if path.stem == "nodeps" else ()
        remedy = f"{name} cannot be installed here; see pip's message above"
        call(*pip, "install", *alone, "-r", str(path), remedy=remedy)
    if needs_torch:
        refuse_cuda(pip[0])
    print(f"nox > {place} holds {size_mb(place)} MB", flush=True)


def lists_of(name: str) -> list[pathlib.Path]:
    """What an engine's folder of tests/engines/kit says about what to install."""
    kit = ROOT / "tests" / "engines" / "kit" / name
    return [path for path in (kit / "requirements.txt", kit / "nodeps.txt") if path.is_file()]


def engine_environment(name: str, lists: list[pathlib.Path] | None = None) -> pathlib.Path:
    """Make the environment that a folder of tests/engines/kit describes, or find it made.

    requirements.txt goes through pip's resolver; nodeps.txt holds packages whose own requirements
    ask for builds that must not be here. genapi itself is installed anew each time, alone. Other
    `lists` than the folder's make another environment.
    """
    lists = lists_of(name) if lists is None else lists
    if name != "torch" and not lists:
        raise BrokenEnvironmentError(f"{name}: nothing says what to install")
    torch = [line for line in PINS.read_bytes().splitlines() if line.startswith(b"torch==")]
    inputs = (sys.version.encode(), *torch, *(path.read_bytes() for path in lists))
    key = hashlib.sha256(b"\n".join(inputs)).hexdigest()[:16]
    home = os.environ.get("GENAPI_ENGINES_HOME", "~/.cache/genapi/engines")
    place = pathlib.Path(home).expanduser() / f"{name}-{key}"
    python = str(place / "bin" / "python")
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet")
    made = place / ".made"
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another checkout may want the same environment
        if not made.is_file():
            fill_engine_environment(name, place, pip, lists)
            made.touch()
        anew = ("install", "--no-deps", "--force-reinstall")
        call(*pip, *anew, str(ROOT), remedy="genapi cannot be built; see pip's message above")
    return place


@functools.cache
def trouble(environment: Environment) -> str | None:
    """Make the environment, once for all sessions of one command; say what went wrong."""
    try:
        environment.prepare()
    except BrokenEnvironmentError as error:
        return str(error)
    return None


def run(session: nox.Session, environment: Environment, program: str, *arguments: str) -> None:
    """Run a program of an environment, made first where need be."""
    if message := trouble(environment):
        session.error(message)
    session.run(environment.program(program), *arguments, external=True)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style and formatting; `-- --fix` repairs what can be repaired."""
    fix = "--fix" in session.posargs
    run(session, DEV, "ruff", "check", *(["--fix"] if fix else []), ".")
    run(session, DEV, "ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check the types of source and tests, call sites included."""
    run(session, DEV, "mypy", *session.posargs)


@nox.session(venv_backend="none")
def architecture(session: nox.Session) -> None:
    """Check the import contracts."""
    run(session, DEV, "lint-imports", "--no-cache", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run every test that needs no real engine; arguments after `--` go to pytest."""
    session.env.setdefault("HYPOTHESIS_PROFILE", os.environ.get("HYPOTHESIS_PROFILE", "ci"))
    run(session, DEV, "python", "-m", "pytest", *session.posargs)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the site into site/; `-- serve` shows it while it is being written."""
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    command = session.posargs or ["build", "--strict", "--quiet"]
    run(session, DEV, "mkdocs", *command)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Run the main job on the embedded engine; arguments after `--` go to the demo."""
    run(session, DEMO, "python", "-m", "genapi.demo", *session.posargs)


def install_engines(session: nox.Session) -> None:
    """Make the environments of real engines and tell the session's programs where they are."""
    try:
        for name in ENGINES:
            session.env[f"GENAPI_ENGINE_{name.upper()}"] = str(engine_environment(name))
    except BrokenEnvironmentError as error:
        session.error(str(error))


@nox.session(venv_backend="none")
def engines(session: nox.Session) -> None:
    """Install real engines and run the tests that need them; arguments after `--` go to pytest.

    `-- all` runs those as well that start many servers, which takes an hour.
    """
    install_engines(session)
    everything = session.posargs == ["all"]
    given = [] if everything else session.posargs
    chosen = "engine" if given or everything else "engine and not long"
    arguments = given or ["tests/engines", "tests/chaos"]
    run(session, DEV, "python", "-m", "pytest", "-m", chosen, *arguments)


@nox.session(venv_backend="none")
def chaos(session: nox.Session) -> None:
    """Kill publishers, workers and engines at every phase, and write what follows into the docs.

    It takes half an hour. Arguments after `--` go to pytest; the page is written when all ran.
    """
    install_engines(session)
    session.env["GENAPI_FAILURES"] = str(ROOT / "docs" / "guide" / "failures.md")
    arguments = session.posargs or ["tests/chaos", "tests/contract/test_chaos.py"]
    run(session, DEV, "python", "-m", "pytest", "-m", "chaos", *arguments)


def at_release(name: str, release: str) -> pathlib.Path:
    """Make an engine's environment at another release than the pinned one."""
    place = ROOT / ".nox" / "drift" / f"{name}-{release}"
    place.mkdir(parents=True, exist_ok=True)
    for path in lists_of(name):
        changed = releases.at_release(name, path.read_text(encoding="utf-8"), release)
        (place / path.name).write_text(changed, encoding="utf-8")
    lists = [place / path.name for path in lists_of(name)]
    made = engine_environment(name, lists)
    at_pin = engine_environment(name)
    asking = [listed for path in lists for listed in releases.names_in(path.read_text("utf-8"))]
    pip = (str(made / "bin" / "python"), "-m", "pip", "--quiet", "install", "--no-deps")
    for _ in range(MOST_ROUNDS):
        mended = releases.to_mend(unmet(made, asking), unmet(at_pin, asking))
        if not mended:
            return made
        call(*pip, "-c", str(PINS), *mended.values(), remedy=f"{name} {release} asks for them")
    raise BrokenEnvironmentError(f"{name} {release} asks for what cannot be had: {mended}")


def unmet(environment: pathlib.Path, names: list[str]) -> list[str]:
    """What distributions ask for and do not get in an environment."""
    python = str(environment / "bin" / "python")
    command = [python, "-c", releases.MISSING, *names]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return list(json.loads(found.stdout))


def other_releases(name: str) -> tuple[list[str], str | None]:
    """The releases of an engine before and after the pinned one that pip can find, or why none."""
    pip = (DEV.program("python"), "-m", "pip", "--disable-pip-version-check")
    listed = subprocess.run(
        [*pip, "index", "versions", releases.DISTRIBUTIONS[name][0]],
        check=False,
        capture_output=True,
        text=True,
    )
    found, unknown = releases.looked_up(listed.returncode, listed.stdout, listed.stderr)
    return releases.others(releases.pinned(name, lists_of(name)), found), unknown


@nox.session(venv_backend="none")
def drift(session: nox.Session) -> None:
    """Run the tests of real engines against other releases of them, and print what changed.

    Arguments like `vllm` or `vllm==0.31.0` choose; without any, the release before the pinned one
    and the newest of every engine are tried. Other arguments go to pytest.
    """
    if message := trouble(DEV):
        session.error(message)
    picks, arguments = releases.chosen(session.posargs)
    names = [name for name in releases.DISTRIBUTIONS if lists_of(name)]
    lines: list[str] = []
    for name in picks or names:
        current = releases.pinned(name, lists_of(name))
        runs: dict[str, dict[str, str] | str] = {}
        picked = picks.get(name)
        found, unknown = (picked, None) if picked else other_releases(name)
        for release in dict.fromkeys([current, *found]):
            try:
                place = (
                    engine_environment(name) if release == current else at_release(name, release)
                )
            except BrokenEnvironmentError as error:
                runs[release] = f"it cannot be installed here ({error})"
                continue
            report = ROOT / ".nox" / "drift" / f"{name}-{release}.xml"
            report.unlink(missing_ok=True)
            session.run(
                *(DEV.program("python"), "-m", "pytest", "-m", "engine", f"--junitxml={report}"),
                *(arguments or ["tests/engines"]),
                env={f"GENAPI_ENGINE_{name.upper()}": str(place)},
                external=True,
                success_codes=range(256),
            )
            told = report.read_text(encoding="utf-8") if report.is_file() else ""
            runs[release] = releases.outcomes(told) if told else "pytest did not come to its end"
        lines += ["", *releases.table(name, current, runs, unknown=unknown)]
    print("\n".join(lines))


@nox.session(venv_backend="none")
def coverage(session: nox.Session) -> None:
    """Run the tests under coverage and report the lines and branches they miss."""
    run(session, DEV, "coverage", "run", "-m", "pytest", *session.posargs)
    run(session, DEV, "coverage", "combine", "--quiet")
    run(session, DEV, "coverage", "report")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure: client CPU per call by HTTP client, and a publication by the number of workers."""
    for name in ("http_clients", "publication"):
        run(session, DEV, "python", f"benchmarks/{name}.py")


@nox.session(venv_backend="none")
def explore(session: nox.Session) -> None:
    """Explore the publication table further than the tests do: minutes; prints what it visits."""
    session.env["PYTHONPATH"] = str(ROOT)
    run(session, DEV, "python", "-m", "tests.explore", *session.posargs)


@nox.session(venv_backend="none")
def mutation(session: nox.Session) -> None:
    """Mutate the pure packages and list what no test notices; arguments go to `mutmut run`."""
    place = ROOT / ".nox" / "mutated"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8") + MUTATED
    (place / "pyproject.toml").write_text(settings, encoding="utf-8")
    session.env["HYPOTHESIS_PROFILE"] = "ci"
    session.env["PYTHONPATH"] = str(ROOT)
    if message := trouble(MUTATION):
        session.error(message)
    with session.chdir(place):
        run(session, MUTATION, "mutmut", "run", *session.posargs)
        run(session, MUTATION, "mutmut", "results")
        run(session, MUTATION, "python", "-m", "tests.explore.rows")


@nox.session(venv_backend="none")
def changelog(session: nox.Session) -> None:
    """Show the changelog as the fragments would make it; `-- build` writes it for a release."""
    run(session, DEV, "towncrier", *(session.posargs or ["build", "--draft"]))


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Resolve requirements/dev.in and genapi's own requirements anew into requirements/dev.txt."""
    place = ROOT / ".nox" / "lock"
    shutil.rmtree(place, ignore_errors=True)
    session.run(sys.executable, "-m", "venv", str(place), external=True)
    pip = (str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
    old = PINS.read_text(encoding="utf-8").splitlines()
    kept = [line for line in old if line.startswith(("#", "torch=="))]  # torch moves by hand
    install = (*pip, "install", "--quiet", "--constraint")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraint:
        constraint.write("\n".join(kept))
        constraint.flush()
        session.run(*install, constraint.name, "torch", external=True)
        wanted = ("-r", str(TOOLS), "-e", f"{ROOT}[{','.join(DEV.extras)}]")
        session.run(*install, constraint.name, *wanted, external=True)
    freeze = (*pip, "freeze", "--exclude-editable")
    found = str(session.run(*freeze, external=True, silent=True, stderr=None)).splitlines()
    pins = [line for line in found if "==" in line and not line.startswith("torch==")]
    PINS.write_text("\n".join([*kept, *sorted(pins, key=str.casefold), ""]), encoding="utf-8")
    shutil.rmtree(place)
