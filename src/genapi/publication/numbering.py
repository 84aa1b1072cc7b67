"""Which version a publication or an adoption is: step, attempt and run, from what workers hold."""

from collections.abc import Callable, Iterable

from genapi.errors import ConfigError, FleetError
from genapi.types.policy import PolicyVersion, version_given

__all__ = ("run_of", "step_number", "version_to_adopt", "version_to_publish")


def step_number(step: int | PolicyVersion) -> int:
    """The step of what the user passed.

    Raises:
        ConfigError: it is neither a step nor a version.
    """
    version = version_given("step", step)
    return version.step if isinstance(version, PolicyVersion) else version


def run_of(
    step: int | PolicyVersion,
    held: Iterable[PolicyVersion],
    *,
    run: str | None,
    mint: Callable[[], str],
) -> str:
    """The run that counts: the fleet's, else the one that workers name, else a new one.

    Raises:
        ConfigError: a version of another run was passed, or workers name several runs.
    """
    if isinstance(step, PolicyVersion):
        if run is not None and step.run != run:
            raise ConfigError(f"{step} is of run {step.run!r}, but the fleet's run is {run!r}")
        return step.run
    if run is not None:
        return run
    runs = sorted({version.run for version in held})
    if len(runs) > 1:
        raise ConfigError(
            f"workers carry versions of several runs ({', '.join(runs)}); pass run= to connect()"
        )
    return runs[0] if runs else mint()


def version_to_adopt(
    step: int | PolicyVersion, held: Iterable[PolicyVersion], *, run: str
) -> PolicyVersion:
    """The version under which workers are adopted that hold `held` of this run.

    Raises:
        FleetError: a worker carries another step, or two attempts of this one are carried.
    """
    number = step_number(step)
    carried = {version for version in held if version.run == run}
    if not carried:
        attempt = step.attempt if isinstance(step, PolicyVersion) else 1
        return PolicyVersion(run=run, step=number, attempt=attempt)
    for version in carried:
        if version.step != number or len(carried) > 1:
            raise FleetError(
                f"cannot adopt step {number}: a worker already carries {version}; adopt that "
                "step, or publish"
            )
    return carried.pop()


def version_to_publish(
    step: int | PolicyVersion,
    held: Iterable[PolicyVersion],
    *,
    run: str,
    committed: PolicyVersion | None,
    tried: int,
    unfinished: bool,
) -> PolicyVersion:
    """The next attempt of this step.

    Args:
        step: what the user passed.
        held: what workers carry.
        run: the run that counts.
        committed: the newest version that every worker was proved to hold.
        tried: the last attempt of this step that anybody is known to have made, 0 = none.
        unfinished: whether a worker may lack the newest step, which may be published again then.

    Raises:
        ConfigError: a newer step is held, or this one by all.
    """
    number = step_number(step)
    carried = [version for version in held if version.run == run]
    newest = max([*(v.step for v in carried), committed.step if committed else -1])
    if number < newest or (number == newest and not unfinished):
        raise ConfigError(
            f"step {number} is not newer than {newest}, which the fleet holds already"
        )
    attempts = [tried, *(v.attempt for v in carried if v.step == number)]
    if committed is not None and committed.step == number:
        attempts.append(committed.attempt)
    attempt = max(attempts) + 1
    if isinstance(step, PolicyVersion):
        attempt = max(attempt, step.attempt)
    return PolicyVersion(run=run, step=number, attempt=attempt)
