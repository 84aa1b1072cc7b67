"""The contract suite on every provider that genapi brings, in memory and behind a socket."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from genapi.testing.contract import MANIFEST, PROFILES, Case, Memory, Profile, Socket, suite
from genapi.testing.contract.bodies import BODIES, shows
from genapi.testing.contract.stand import Rig
from tests.conftest import is_case_id
from tests.support.cases import marked

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs"
MEMORY, SOCKET = Memory(), Socket()


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    """What the socket carrier starts ends with this module."""
    with SOCKET:
        yield


@pytest.mark.parametrize("case", marked(suite(PROFILES, [MEMORY])))
async def test_in_memory(case: Case) -> None:
    await case.run()


@pytest.mark.parametrize("case", marked(suite(PROFILES, [SOCKET])))
async def test_behind_a_socket(case: Case) -> None:
    await case.run()


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.provider)
@pytest.mark.parametrize("how", ["fails", "is_cancelled"])
async def test_a_body_that_ends_early_leaves_shared_servers_as_it_found_them(
    profile: Profile, how: str
) -> None:
    rig = Rig(profile, SOCKET)
    scope = anyio.CancelScope()
    with pytest.raises(AssertionError, match="of the body") if how == "fails" else scope:
        async with rig.stand(2) as stand:
            await stand.publisher().publish(1, stand.weights(1))
            await stand.pause(0)
            if how == "fails":
                raise AssertionError("of the body")
            scope.cancel()
            await anyio.sleep_forever()
    async with rig.stand(2) as stand:
        workers = (await stand.fleet.snapshot()).workers
        assert not any(worker.paused for worker in workers)
        replies = await stand.everywhere()
        assert len(replies) == 2
        for reply in replies:
            stand.check(0, reply)


# the manifest


def test_every_behaviour_has_one_id_and_one_body() -> None:
    ids = [behaviour.id for behaviour in MANIFEST]
    assert sorted(ids) == sorted(BODIES)
    assert all(re.fullmatch(r"[a-z]+:[a-z]+(-[a-z]+)*", name) for name in ids)


def test_a_body_without_an_id_of_its_own_is_refused() -> None:
    for name in ("publish:nothing", MANIFEST[0].id):
        with pytest.raises(ValueError, match=name):
            shows(name)


@pytest.mark.parametrize("excluded", [{"publish:nothing": "why"}, {"publish:commit": " "}])
def test_an_exclusion_without_a_behaviour_or_a_reason_is_refused(excluded: dict[str, str]) -> None:
    paths = PROFILES[0].paths
    profile = Profile(provider="x", paths=paths, logprobs_mode="raw", excluded=excluded)
    with pytest.raises(ValueError, match="x: excluded"):
        suite([profile], [MEMORY])


def test_a_profile_that_lacks_routes_is_refused_and_they_are_named() -> None:
    profile = Profile(
        provider="x",
        logprobs_mode="raw",
        paths={
            "health": "/health",
            "generate": "/generate",
            "pause": "/pause",
            "resume": "/resume",
            "begin": "/begin",
            "update": "/update",
            "finish": "/finish",
            "label": "",
        },
    )
    with pytest.raises(ValueError, match=r"^x: paths lacks 'join', 'label', 'sleep'$"):
        suite([profile], [MEMORY])
    awake = replace(profile, excluded={"publish:asleep": "it does not sleep"})
    with pytest.raises(ValueError, match=r"^x: paths lacks 'join', 'label'$"):
        suite([awake], [MEMORY])


def test_every_behaviour_names_a_page_of_the_docs_or_a_report() -> None:
    for behaviour in MANIFEST:
        assert is_case_id(behaviour.source) or (DOCS / behaviour.source).is_file()


def test_every_behaviour_is_shown_by_some_provider_on_every_carrier_that_it_has() -> None:
    shown = {(case.behaviour.id, case.carrier.name) for case in suite(PROFILES, [MEMORY, SOCKET])}
    wanted = {(b.id, name) for b in MANIFEST for name in ("memory", "socket") if b.runs_on(name)}
    assert shown == wanted
