"""Every behaviour that a provider has to show: id, where it comes from, and the sentence.

The rule of this file: a behaviour is what a user of a fleet can see, in words that no engine owns.
What a provider does not have is excluded by its profile, with the reason; what a carrier cannot
show is said here.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ("MANIFEST", "Behaviour", "CarrierName")

CarrierName = Literal["memory", "socket", "real"]

_KILLS = "it kills or restarts servers that others share"
_LOOKS = "only an engine in this process can be looked into"
_FLAGS = "it needs servers that were started with flags of their own"
_BREAKS = "it leaves servers that only a restart heals"
_THREE = "it needs three servers; two are shared"
_MANY = "it runs one publication after the other, which takes real engines minutes"
_SHOWN = "the client shows it before anything is sent: nothing in it is the engine's"
_CLIENT = "what goes wrong is between genapi and the server, which in memory is the same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """One behaviour.

    Attributes:
        id: `area:what`.
        source: the page of the docs that promises it, or the id of the public report it is about.
        sentence: what is true.
        memory_only: why it is shown in memory alone; empty = on every carrier.
        embedded_only: why no real engine shows it here; empty = real engines do.
    """

    id: str
    source: str
    sentence: str
    memory_only: str = ""
    embedded_only: str = ""

    def runs_on(self, carrier: CarrierName) -> bool:
        """Whether a carrier shows it."""
        match carrier:
            case "memory":
                return True
            case "socket":
                return not self.memory_only
            case "real":
                return not self.memory_only and not self.embedded_only


def _row(
    name: str, source: str, sentence: str, *, memory_only: str = "", embedded_only: str = ""
) -> Behaviour:
    return Behaviour(
        id=name,
        source=source,
        sentence=sentence,
        memory_only=memory_only,
        embedded_only=embedded_only,
    )


_REPLIES, _REQUESTS = "reference/replies.md", "reference/requests.md"
_VERSIONS, _PUBLISHING = "guide/versions.md", "guide/publishing.md"
_ERRORS, _CONFIGURATION = "guide/errors.md", "guide/configuration.md"
_FLEET = "reference/fleet.md"

MANIFEST: tuple[Behaviour, ...] = (
    # discovery
    _row("ready:workers", _FLEET, "Waiting until a fleet is ready tells who answers, as what."),
    _row(
        "ready:expected",
        "DISC-01",
        "A fleet of another size than expected is not ready and says what was seen.",
    ),
    _row(
        "ready:absent",
        _FLEET,
        "A worker that does not answer is the one that is named when the time is up.",
        embedded_only=_CLIENT,
    ),
    _row(
        "ready:not-yet",
        "DISC-07",
        "A server that answers 503 while it starts is waited for.",
        memory_only=_CLIENT,
    ),
    _row(
        "ready:stranger",
        _ERRORS,
        "Another kind of server at the address is named at once, as a mistake in the target.",
        embedded_only=_CLIENT,
    ),
    _row(
        "ready:key",
        "AUTH-03",
        "A server that wants a key refuses a fleet without one at once, and takes the right one.",
        memory_only=_FLAGS,
    ),
    _row(
        "ready:life",
        _FLEET,
        "A process that comes up at the address of another is another worker.",
        memory_only=_KILLS,
    ),
    _row("ready:paused", _FLEET, "A worker that somebody paused is shown as paused."),
    # generation
    _row(
        "generate:reply",
        _REPLIES,
        "A reply has ids, a finite score for each, a trace, who made it and under which ids.",
    ),
    _row("generate:greedy", _REPLIES, "Greedy tokens are those of the weights that are served."),
    _row("generate:no-scores", _REQUESTS, "Scores that were not asked for are not there."),
    _row(
        "generate:candidates",
        "LOGP-07",
        "Candidates come for each position, with their ids; zero of them is not none.",
    ),
    _row(
        "generate:prompt-scores",
        "WIRE-01",
        "Scores of the prompt have its length, and the first one is a hole.",
    ),
    _row("generate:stop-id", "FIN-03", "A stop id ends the output, is kept in it and is named."),
    _row("generate:outputs", _REQUESTS, "Several outputs of one prompt come in their order."),
    _row("generate:seed", _REQUESTS, "A seed repeats a draw."),
    _row("generate:mode", "NUM-03", "Every reply names of which distribution its scores are."),
    _row(
        "generate:remark",
        "NUM-03",
        "Raw scores at another temperature than 1 are remarked on; `strict` makes it an error.",
    ),
    _row("generate:vocabulary", _ERRORS, "An id beyond the vocabulary is an error that names it."),
    _row("generate:overlong", _ERRORS, "A prompt that leaves no room is its own kind of error."),
    _row(
        "generate:wire-ids",
        "RETRY-05",
        "Two requests under one label of the user's have ids of their own on the wire.",
    ),
    _row("generate:usage", _REPLIES, "The reply counts the tokens of prompt and output."),
    _row("generate:turn", _REQUESTS, "The next turn goes on from the last one, id for id."),
    _row(
        "generate:text",
        _REQUESTS,
        "A text is answered as the ids that were made of it, which the reply names.",
    ),
    _row(
        "generate:chat",
        _REQUESTS,
        "A chat is answered as the ids that its template made of it, which the reply names.",
    ),
    _row("generate:session", _REQUESTS, "Requests of one session stay on one worker."),
    _row("generate:many", "POOL-01", "Many calls at once each get the reply to their own prompt."),
    _row("stream:equal", _REPLIES, "A stream ends in the reply that `generate` returns."),
    _row("stream:chat", _REPLIES, "A streamed chat ends in the reply that `generate` returns."),
    _row("stream:pieces", "STREAM-12", "The pieces of a stream join to the output it ends with."),
    _row(
        "stream:left",
        _REQUESTS,
        "Leaving a stream early ends the generation on the engine.",
        memory_only=_LOOKS,
    ),
    _row(
        "generate:cancelled",
        _REQUESTS,
        "Cancelling a call ends the generation on the engine.",
        memory_only=_LOOKS,
    ),
    _row("abort:label", "FIN-01", "An abort by the user's label ends the call with what it has."),
    _row("abort:neighbour", "ABORT-05", "An abort ends that request and none beside it."),
    # what goes wrong with a request
    _row(
        "fault:lost-reply",
        "RETRY-05",
        "A request whose reply was lost is asked again under a new wire id.",
        embedded_only=_CLIENT,
    ),
    _row(
        "fault:may-have-run",
        _ERRORS,
        "Where lost replies are not asked again, the error says that it may have run.",
        memory_only=_CLIENT,
    ),
    _row(
        "fault:unavailable",
        "RETRY-03",
        "A server that is always unavailable is asked as often as the policy says.",
        memory_only=_CLIENT,
    ),
    _row(
        "fault:garbled",
        _ERRORS,
        "A reply that cannot be read is an error that keeps the body.",
        memory_only=_CLIENT,
    ),
    _row(
        "fault:silent",
        _REQUESTS,
        "A call that nobody answers ends within its `timeout_s`.",
        memory_only=_CLIENT,
    ),
    _row(
        "fault:broken-stream",
        "STREAM-05",
        "A stream that breaks off is an error that holds what had come.",
        embedded_only=_CLIENT,
    ),
    _row(
        "fault:dead-worker",
        "DISC-12",
        "A dead worker is left out, and the request goes to another.",
        memory_only=_KILLS,
    ),
    # versions
    _row("version:unknown", "VER-04", "Before a version is published, tokens are of none."),
    _row("version:chat", _VERSIONS, "A chat names the version of its tokens as ids do."),
    _row("version:held", _VERSIONS, "A version that is held already is met at once."),
    _row("version:awaited", _VERSIONS, "A request waits for the publication of its version."),
    _row(
        "version:late",
        _VERSIONS,
        "A version that does not come in time is named with what was seen.",
    ),
    _row("version:passed", _VERSIONS, "A version that has passed is refused at once."),
    _row(
        "version:elsewhere",
        _VERSIONS,
        "A process that does not publish sees the versions of one that does.",
    ),
    # publications
    _row(
        "publish:commit",
        _PUBLISHING,
        "Every worker serves the published weights under the published version, proved by its "
        "own label.",
    ),
    _row("publish:adopt", _PUBLISHING, "Adopting labels fresh servers and moves nothing."),
    _row(
        "publish:adopted",
        _PUBLISHING,
        "Adopting again changes nothing; another step is refused.",
        embedded_only=_SHOWN,
    ),
    _row(
        "publish:kept",
        "VER-02",
        "A request that is kept through a publication names the version of each token.",
    ),
    _row(
        "publish:kept-stale",
        _VERSIONS,
        "A request that goes on over old keys and values says so, and is not pure.",
    ),
    _row(
        "publish:abort",
        "FIN-01",
        "The mode `abort` ends requests in flight with what they have.",
    ),
    _row("publish:drain", _PUBLISHING, "The mode `drain` lets requests in flight end first."),
    _row(
        "publish:prefix",
        _VERSIONS,
        "What a prefix cache holds of old weights is not found after a publication.",
    ),
    _row(
        "publish:older",
        _PUBLISHING,
        "A step that is not newer is refused before anything is touched.",
        embedded_only=_SHOWN,
    ),
    _row(
        "publish:group",
        _PUBLISHING,
        "A second publication uses the transfer group that stands.",
        embedded_only=_MANY,
    ),
    _row(
        "publish:shape",
        _PUBLISHING,
        "A tensor of a wrong shape leaves every worker dirty and paused, and nobody is resumed.",
        memory_only=_BREAKS,
    ),
    _row(
        "publish:way-back",
        _PUBLISHING,
        "The way back that a receipt names leads back.",
        memory_only=_BREAKS,
    ),
    _row(
        "publish:death",
        _PUBLISHING,
        "A worker that dies in an update is never committed, and nobody is resumed.",
        memory_only=_KILLS,
    ),
    _row(
        "publish:dead-before",
        "DISC-12",
        "A worker that died before a publication stops it before any pause.",
        memory_only=_KILLS,
    ),
    _row(
        "publish:lost-update",
        "WUP-09",
        "A lost reply to an update never ends in a worker that serves something else than it says.",
        embedded_only="engines' own tests hold lost replies against a reference",
    ),
    _row(
        "publish:lost-finish",
        _PUBLISHING,
        "A lost reply to the end of a session is decided by what is read back, or by nothing.",
        embedded_only="engines' own tests hold lost replies against a reference",
    ),
    _row(
        "publish:lost-label",
        _PUBLISHING,
        "A label whose answer was lost is read back.",
        embedded_only="engines' own tests hold lost replies against a reference",
    ),
    _row(
        "publish:no-finish",
        _PUBLISHING,
        "A session whose end never took effect is not committed, and its worker stays fenced.",
        memory_only=_BREAKS,
    ),
    _row(
        "publish:no-pause",
        "WUP-11",
        "A pause that is never answered is named in time, and the other worker serves on.",
        memory_only=_CLIENT,
    ),
    _row(
        "publish:error-inside",
        "WUP-01",
        "An error inside a 200 is an error of that worker, and it gets no new version.",
        memory_only=_BREAKS,
    ),
    _row(
        "publish:one-of-three",
        "WUP-03",
        "An error on one of three workers resumes nobody, and is no error of the others.",
        memory_only=_THREE,
    ),
    _row(
        "publish:peer",
        "WUP-05",
        "An update whose sender went away is closed once, and the next publication commits.",
        memory_only=_LOOKS,
    ),
    _row(
        "publish:other-life",
        "WUP-07",
        "A worker that restarted since is refused once, and published to next.",
        memory_only=_KILLS,
    ),
    _row(
        "publish:asleep",
        "WUP-16",
        "A worker that sleeps is refused before anything is sent to it.",
        memory_only=_FLAGS,
    ),
    _row(
        "publish:paused",
        _PUBLISHING,
        "A worker that somebody left paused is published to and serves again.",
    ),
    _row(
        "publish:half",
        _PUBLISHING,
        "A worker that was left half-updated says so to every process, and is not adopted.",
        memory_only=_BREAKS,
    ),
    _row(
        "publish:cancelled",
        _PUBLISHING,
        "A cancelled publication ends with one version or with fences.",
        memory_only=_MANY,
    ),
    _row(
        "publish:checksum",
        _PUBLISHING,
        "Checksums agree where the bytes do, and name a worker whose bytes differ.",
        memory_only=_LOOKS,
    ),
    _row(
        "publish:probe",
        _PUBLISHING,
        "Workers that score alike pass the probe before they serve.",
    ),
    _row(
        "publish:restarter",
        _PUBLISHING,
        "A server that died is restarted first where a restarter is given.",
        memory_only=_KILLS,
    ),
)
