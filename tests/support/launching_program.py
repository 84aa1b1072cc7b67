"""A program that launches, says what it started, and waits to be ended from outside.

    python -m tests.support.launching_program FOLDER

One of its components has a child in a session of its own. The program itself has a child that holds
copies of everything that it has open.
"""

import asyncio
import json
import os
import pathlib
import signal
import sys
import time

import genapi
from genapi.events import ComponentStarted, Event
from tests.support.launched import SERVE, Beside, engines

__all__ = ()

SIDECAR = f"""{SERVE}
import os, subprocess
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
open(os.environ["PID_FILE"] + ".new", "w").write(str(child.pid))
os.rename(os.environ["PID_FILE"] + ".new", os.environ["PID_FILE"])
threading.Event().wait()
"""


async def main(folder: pathlib.Path) -> None:
    pids: list[int] = []
    pid_file = folder / "grandchild"

    def observe(event: Event) -> None:
        if isinstance(event, ComponentStarted):
            pids.append(event.pid)

    config = Beside(engines(), {"sidecar": SIDECAR}, variables={"PID_FILE": str(pid_file)})
    launched = genapi.launch(config, folder=folder / "logs", observe=observe)
    async with launched:
        while not pid_file.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        pids.append(int(pid_file.read_text(encoding="utf-8")))
        forked = os.fork()
        if forked == 0:
            time.sleep(600)  # noqa: ASYNC251, TID251 - a process of its own
        assert launched.running is not None
        urls = [component.url for component in launched.running.components]
        sys.stdout.write(json.dumps({"pids": pids, "urls": urls, "forked": forked}) + "\n")
        sys.stdout.flush()
        await asyncio.sleep(600)


if __name__ == "__main__":
    # A shell lets what it runs in the background ignore it, and so does whatever that starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(main(pathlib.Path(sys.argv[1])))
