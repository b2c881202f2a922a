"""Make the kept data of a release, once, before it is tagged; data of earlier releases stays as it is::

    python -m tests.compatibility.make                       # of the version at hand, into tests/compatibility/VERSION
    python -m tests.compatibility.make 0.2.0 DIR             # into another directory
    python -m tests.compatibility.make --only sessions       # one part again, as long as the version is not released

Parts: stores, sessions, checkpoints, names.
"""

from __future__ import annotations

import json
import lzma
import tarfile
import tempfile
from collections.abc import Callable
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import click

from dledger_core import Client
from tests.compatibility.clusters import CLUSTERS, KeptCluster, answers_of, facts_of, json_fields, members_of
from tests.compatibility.public_names import public_names
from tests.compatibility.sessions import record_client, record_links, samples
from tests.support.archives import unpack

KEPT = Path(__file__).parent
VERSIONS = sorted(path for path in KEPT.iterdir() if path.name[0].isdigit())
"""The directories of all kept releases."""
SESSION_STORE = "session"
"""The cluster of one node that the recorded client talks to."""


def pack(archive: Path, directory: Path) -> None:
    """Write a directory as an archive; numbers of users and times of files do not matter."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(archive, "w:xz", preset=9) as tar:
        tar.add(directory, directory.name, filter=plain)


def extract(archive: Path, directory: Path) -> Path:
    """Unpack an archive; return the directory that it contains."""
    with tarfile.open(archive) as tar:
        unpack(tar, directory)
        return directory / tar.getnames()[0].split("/")[0]


def load(path: Path) -> Any:
    """Return the content of a compressed JSON file."""
    return json.loads(lzma.decompress(path.read_bytes()))


def _save(path: Path, value: Any) -> None:
    path.write_bytes(lzma.compress(json.dumps(value, indent=1).encode(), preset=9))


def _make_stores(target: Path) -> None:
    for name, kept in CLUSTERS.items():
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch) / name
            kept.make(directory, kept)
            for log in directory.glob("*.log"):
                log.unlink()
            pack(target / f"stores-{name}.tar.xz", directory)
            facts = facts_of(directory)
            end = 1 + max(store["last_index"] for store in facts.values())
            _save_expected(target, name, kept, facts, end, Path(scratch))


def _save_expected(target: Path, name: str, kept: KeptCluster, facts: Any, end: int, scratch: Path) -> None:
    """Write what the files say, and what the nodes answer when they start on a copy of the archive."""
    directory = extract(target / f"stores-{name}.tar.xz", scratch / "copy")
    with kept.start(directory) as cluster, Client(cluster.peers, retry_timeout_ms=60_000) as client:
        answers = answers_of(client, kept, end)
        expected = {"end": end, "stores": facts, "answers": answers, "members": members_of(client)}
        if name == "native":
            expected["json"] = json_fields(cluster)
    (target / f"stores-{name}.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


def _make_sessions(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        kept, directory = KeptCluster(lambda *_: None, nodes=1), Path(scratch) / SESSION_STORE
        with kept.start(directory) as cluster, Client(cluster.peers) as client:
            client.append([b"before the session"])
        for log in directory.glob("*.log"):
            log.unlink()
        pack(target / "session-store.tar.xz", directory)
        with kept.start(directory) as cluster, Client(cluster.peers) as client:
            metadata = client.metadata()
            assert metadata.log_uuid is not None
            frames = record_client(address_of(cluster.peers), metadata.log_uuid, client.bounds().end)
        links = record_links(Path(scratch) / "links")
    _save(target / "sessions.json.xz", {"client": frames, "links": links, "samples": samples()})


def address_of(peers: str) -> tuple[str, int]:
    """Return the address of the only node of a peers string."""
    host, _, port = peers.partition("-")[2].rpartition(":")
    return host, int(port)


def _make_checkpoints(target: Path) -> None:
    from tests.spark_connector.kept_checkpoint import make_checkpoints  # needs Spark

    make_checkpoints(target / "checkpoint.tar.xz")


def _make_names(target: Path) -> None:
    (target / "names.txt").write_text("\n".join(public_names()) + "\n")


PARTS: dict[str, Callable[[Path], None]] = {
    "stores": _make_stores,
    "sessions": _make_sessions,
    "checkpoints": _make_checkpoints,
    "names": _make_names,
}


@click.command(help=__doc__)
@click.argument("version", default=version_of("dledger"))
@click.argument("directory", type=click.Path(path_type=Path), required=False)
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="Parts to make [default: all].")
def main(version: str, directory: Path | None, only: tuple[str, ...]) -> None:
    """Make the kept data of a release."""
    if version != version_of("dledger"):
        raise click.UsageError(
            f"the installed version is {version_of('dledger')}, not {version}: check that version out"
        )
    target = directory or KEPT / version
    target.mkdir(parents=True, exist_ok=True)
    for part in only or PARTS:
        PARTS[part](target)
        click.echo(f"made {part} in {target}", err=True)


if __name__ == "__main__":
    main()
