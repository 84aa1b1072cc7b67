"""The contract suite: what every provider has to show, one body for all of them.

`MANIFEST` says each behaviour in a sentence and where it comes from. `Profile` is what the suite
has to know of a provider: what it is excluded from, and why. A `Carrier` brings servers: objects in
this process, processes behind a socket, real engines. `suite` makes the cases of both:

    CASES = suite([PROFILE], [CARRIER])

    @pytest.mark.parametrize("case", CASES, ids=str)
    async def test_contract(case: Case) -> None:
        await case.run()
"""

from .carriers import Memory, Socket
from .manifest import MANIFEST, Behaviour, CarrierName
from .meddling import Action, Meddling
from .profiles import PROFILES
from .shared import Shared
from .stand import Carrier, Operation, Profile, Rig, Servers, Stand
from .suite import Case, suite
from .table import capabilities

__all__ = (
    "MANIFEST",
    "PROFILES",
    "Action",
    "Behaviour",
    "Carrier",
    "CarrierName",
    "Case",
    "Meddling",
    "Memory",
    "Operation",
    "Profile",
    "Rig",
    "Servers",
    "Shared",
    "Socket",
    "Stand",
    "capabilities",
    "suite",
)
