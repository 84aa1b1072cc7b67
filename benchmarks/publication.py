"""How long a publication takes by the number of workers: embedded engines, one process.

    python benchmarks/publication.py [WORKERS ...]

Moves the smallest tensor of the model, so that what is measured is the administration: about
twenty-five calls a worker, each answered by the embedded engine in this very process.
"""

import asyncio
import platform
import statistics
import sys
import time

import genapi
from genapi.embedded import policy

ROUNDS = 3


async def publication_s(workers: int) -> float:
    """Seconds of the fastest of some publications onto `workers` workers."""
    tensors = policy.init(1)
    name = min(tensors, key=lambda key: tensors[key].nbytes)
    source = genapi.weights.from_tensors({name: tensors[name]})
    times = []
    async with genapi.connect(f"embedded://?workers={workers}&rpc_s=0&step_s=0") as fleet:
        await fleet.wait_ready(timeout_s=120)
        async with genapi.WeightPublisher(fleet, transport=genapi.weights.Memory()) as publisher:
            await publisher.publish(0, source)  # forms the group
            for step in range(1, 1 + ROUNDS):
                began = time.perf_counter()
                report = await publisher.publish(step, source)
                times.append(time.perf_counter() - began)
                assert len(report.receipts) == workers
    return statistics.median(times)


def main() -> None:
    """Print a table."""
    counts = [int(text) for text in sys.argv[1:]] or [10, 100, 1000]
    print(f"Python {platform.python_version()}, median of {ROUNDS} publications")
    print(f"{'workers':>8} {'seconds':>9} {'ms a worker':>12} {'growth':>7}")
    first = None
    for count in counts:
        seconds = asyncio.run(publication_s(count))
        each = 1000 * seconds / count
        first = first or each
        print(f"{count:>8} {seconds:>9.3f} {each:>12.3f} {each / first:>7.2f}")


if __name__ == "__main__":
    main()
