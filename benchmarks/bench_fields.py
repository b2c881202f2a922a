"""Reading a few columns that the node selects, compared with reading complete entries and selecting in the client.

Method: three nodes as processes of their own with default settings, ``--entries`` entries of 1,024 bytes and as many
RocketMQ messages with such bodies. One client reads all of them in order, in requests of 8 MiB of records, with
``columns`` and without; of messages the client without decodes the same columns. Cases alternate for ``--rounds``
rounds, and the median counts. Reported: entries per second, and the ratio with columns to without. Not included: a
network, which complete entries load 40 times as much; nodes and client share one machine's processors, and the page
cache has all files.

Run: ``python -m benchmarks.bench_fields [--entries 200000] [--rounds 5]``. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict

from dledger_core import Client, LocalCluster
from dledger_core.rocketmq import decode_messages, encode_messages

BODY_BYTES = 1024
BATCH = 2000
OF_ENTRIES = ["index", "term", "timestamp"]
OF_MESSAGES = ["index", "topic", "tags", "store_timestamp"]


def read(peers: str, group: str, columns: list[str] | None) -> float:
    """Read the log; return entries per second."""
    with Client(peers, group) as client:
        bounds = client.bounds()
        count, began = 0, time.perf_counter()
        for batch in client.tail(bounds.first_index, bounds.end, columns=columns):
            if columns is None and group == "messages":
                decode_messages(batch.column("body"), OF_MESSAGES[1:])
            count += batch.num_rows
        return count / (time.perf_counter() - began)


def main() -> None:
    """Run the rounds and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    plain = [b"x" * BODY_BYTES] * BATCH
    messages = encode_messages("orders", 0, plain, "created", "key")
    found: dict[str, list[float]] = defaultdict(list)
    with LocalCluster(3, groups=("entries", "messages")) as cluster:
        for group, bodies in (("entries", plain), ("messages", messages)):
            with Client(cluster.peers, group) as client:
                for _ in range(options.entries // BATCH):
                    client.append(bodies)
        for number in range(options.rounds):
            for group, columns in (("entries", OF_ENTRIES), ("messages", OF_MESSAGES)):
                for chosen in (columns, None) if number % 2 else (None, columns):
                    name = f"{group}{'' if chosen is None else '_columns'}"
                    found[name].append(read(cluster.peers, group, chosen))
    medians = {case: round(statistics.median(rates)) for case, rates in found.items()}
    ratios = {group: round(medians[f"{group}_columns"] / medians[group], 2) for group in ("entries", "messages")}
    sys.stdout.write(f"{json.dumps({'entries_per_s': medians, 'ratios': ratios})}\n")


if __name__ == "__main__":
    main()
