"""The cost of an archive: proving, reading it instead of the log, and appends while ranges are proved.

Method: three nodes on loopback (``TMPDIR`` names their disk), a log with ``--mb`` of 1 KB entries. Its archive begins
before them, so that retention, which would keep 64 MiB, deletes none of them. Then

* ``log_mb_per_s``: a batch query's reader (``spark_connector``, in this process) reads all entries from the log.
* ``prove_job_mb_per_s``: bodies per second of the job's processor time, which reads rows of the table and hashes them.
* ``prove_node_mb_per_s``: the same of the leader, which reads its files, checks all CRCs and hashes; a fifth of the
  ranges, without appends. ``prove_mb_per_s`` has both, in turn.
* ``append_p99_ms`` and ``append_p99_ms_while_proving``: ten entries of 1 KB at a time, ``--rate`` times a second. Four
  times a fifth of the ranges is proved, and before each time appends are measured for as long. The digests are ready:
  a job computes them on other machines.
* ``archive_mb_per_s``: retention has deleted the entries, and the same reader reads and verifies them in the archive.

Run: ``python -m benchmarks.bench_archive [--mb 1024] [--rate 100]``. Prints one JSON object, with the load before it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from deltalake import write_deltalake

from benchmarks.timing import seconds
from dledger_core import Client, LocalCluster, RowsDigest, rows_digest
from dledger_core.archive import ArchiveTable
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerBatchReader
from spark_connector.schemas import ENTRY_SCHEMA

BODY, BATCH, RANGE = 1000, 4000, 32_000
MB = 1 << 20
FILE = 16 * MB


def processor_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fill(client: Client, entries: int) -> None:
    """Append entries whose bodies do not compress."""
    noise = np.random.default_rng(1)
    for _ in range(0, entries, BATCH):
        client.append([noise.bytes(BODY) for _ in range(BATCH)])


def write_rows(client: Client, table: Path, start: int, end: int) -> None:
    """Copy rows of the log to the table, a commit for each range."""
    for at in range(start, end, RANGE):
        stop, batches, index = min(at + RANGE, end), [], at
        while index < stop:
            found = client.fetch(index, stop, max_bytes=8 * MB, min_end=stop)
            batches.append(found.batch)
            index = found.next_index
        rows = pa.Table.from_batches(batches)
        group = pa.array([client.group] * rows.num_rows)
        write_deltalake(table, rows.add_column(0, "group", group), mode="append")


def read(peers: str, start: int, end: int, *, archive: bool) -> None:
    """Read [start, end) as a batch query does."""
    bounds = {"startingOffsets": json.dumps({"default": start}), "endingOffsets": json.dumps({"default": end})}
    given = {"peers": peers, "archive": "true" if archive else "false", **bounds}
    reader = DLedgerBatchReader(DLedgerOptions.for_reading(given))
    rows = sum(batch.num_rows for one in reader.partitions() for batch in reader.read(one))
    if rows < (end - start) * 9 // 10:
        raise SystemExit(f"{rows} of {end - start} entries were read")


class Appends:
    """Appends in a thread, and how long each of them took; a context manager.

    Args:
        client: the client.
        rate: how many begin in a second, at most.
        times: gets the seconds of each.
    """

    def __init__(self, client: Client, rate: float, times: list[float]) -> None:
        self._client, self._every, self._times = client, 1 / rate, times
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        bodies = [bytes(BODY)] * 10
        while not self._ended.wait(self._every):
            self._times.append(seconds(lambda: self._client.append(bodies)))


def measure(cluster: LocalCluster, client: Client, table: Path, megabytes: int, rate: float) -> dict[str, float]:
    """Return the figures."""
    write_deltalake(table, ENTRY_SCHEMA.empty_table())
    client.append([b"first"])
    first = client.archivable_ranges().start
    begin = client.bounds().end
    write_rows(client, table, first, begin)
    archive = ArchiveTable(str(table))

    def digest(start: int, end: int) -> RowsDigest:
        return rows_digest(archive.rows(client.group, start, end))

    def prove(digests: dict[tuple[int, int], RowsDigest]) -> None:
        for (start, end), known in digests.items():
            if not client.prove_archived(start, end, known, table=archive.uri).equal:
                raise SystemExit(f"the table differs from the log in [{start}, {end})")

    prove({(first, begin): digest(first, begin)})
    fill(client, megabytes * MB // BODY)
    end = client.bounds().end
    write_rows(client, table, begin, end)
    archive.reopen()
    read(cluster.peers, begin, end, archive=False)  # so that all is in the page cache
    log_s = seconds(lambda: read(cluster.peers, begin, end, archive=False))
    ranges = [(at, min(at + RANGE, end)) for at in range(begin, end, RANGE)]
    cpu = time.process_time()
    digests = {one: digest(*one) for one in ranges}
    job_s = time.process_time() - cpu
    fifth = max(1, len(ranges) // 5)
    parts = [{one: digests[one] for one in ranges[at : at + fifth]} for at in range(0, len(ranges), fifth)]
    leader = cluster.pid(cluster.leader())
    cpu = processor_s(leader)
    prove(parts[0])
    node_s = (processor_s(leader) - cpu) * len(ranges) / len(parts[0])
    alone, busy = list[float](), list[float]()
    last = 1.0
    for part in parts[1:]:
        with Appends(client, rate, alone):
            time.sleep(last)
        with Appends(client, rate, busy):
            last = seconds(lambda part=part: prove(part))
    # Retention deletes complete files below the end of the archive, once newer entries fill what it keeps.
    while (stored := client.bounds().first_index) < end - 2 * FILE // BODY:
        fill(client, BATCH)
    archive_s = seconds(lambda: read(cluster.peers, begin, stored, archive=True)) * (end - begin) / (stored - begin)
    size = (end - begin) * BODY / 1e6
    figures = {
        "log_mb_per_s": size / log_s,
        "archive_mb_per_s": size / archive_s,
        "archive_of_log": log_s / archive_s,
        "prove_job_mb_per_s": size / job_s,
        "prove_node_mb_per_s": size / node_s,
        "prove_mb_per_s": size / (job_s + node_s),
        "append_p99_ms": float(np.percentile(alone, 99)) * 1000,
        "append_p99_ms_while_proving": float(np.percentile(busy, 99)) * 1000,
    }
    ratio = figures["append_p99_ms_while_proving"] / figures["append_p99_ms"]
    return {name: round(value, 2) for name, value in (figures | {"append_p99_ratio": ratio}).items()}


def main() -> None:
    """Runs the nodes and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=100)
    given, load = parser.parse_args(), os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalCluster(3, data_segment_bytes=FILE, retain_bytes=64 * MB) as cluster,
        Client(cluster.peers) as client,
    ):
        found = measure(cluster, client, Path(directory) / "table", given.mb, given.rate)
    sys.stdout.write(json.dumps({"mb": given.mb, "rate": given.rate, "load": round(load, 1), **found}) + "\n")


if __name__ == "__main__":
    main()
