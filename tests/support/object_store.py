"""S3-compatible storage on loopback: a bucket to which Spark and ``deltalake`` write.

The server is a process of its own: ``deltalake`` keeps Python's lock while it waits for the rows of a query.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3

KEY, SECRET = "key-of-the-tests", "secret-of-the-tests"
"""Credentials; the server takes any."""
REGION = "eu-central-1"
_SERVE = """
import logging, sys
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.WARNING)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://%s:%s" % server.get_host_and_port(), flush=True)
sys.stdin.read()
server.stop()
"""


@dataclass(frozen=True)
class Bucket:
    """An empty bucket.

    Attributes:
        endpoint: URL of the server.
        name: of the bucket.
    """

    endpoint: str
    name: str = "history"

    @property
    def storage(self) -> dict[str, str]:
        """Options of ``deltalake``."""
        return {
            "aws_endpoint_url": self.endpoint,
            "aws_allow_http": "true",
            "aws_region": REGION,
            "aws_access_key_id": KEY,
            "aws_secret_access_key": SECRET,
        }

    @property
    def of_hadoop(self) -> dict[str, str]:
        """Settings of Spark's file system ``s3a``."""
        given = {"endpoint": self.endpoint, "endpoint.region": REGION, "access.key": KEY, "secret.key": SECRET}
        given |= {"path.style.access": "true", "connection.ssl.enabled": "false"}
        return {f"spark.hadoop.fs.s3a.{name}": value for name, value in given.items()}

    def upload(self, directory: Path, prefix: str) -> None:
        """Copy the files of a directory, as ``aws s3 cp --recursive`` does."""
        for path in sorted(each for each in directory.rglob("*") if each.is_file()):
            self._client.upload_file(str(path), self.name, f"{prefix}/{path.relative_to(directory)}")

    def create(self) -> None:
        self._client.create_bucket(Bucket=self.name, CreateBucketConfiguration={"LocationConstraint": REGION})

    @property
    def _client(self):
        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name=REGION, aws_access_key_id=KEY, aws_secret_access_key=SECRET
        )


@contextmanager
def bucket_on_loopback() -> Iterator[Bucket]:
    """Run a server on a free port, with one bucket."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            bucket = Bucket(server.stdout.readline().strip())
            bucket.create()
            yield bucket
        finally:
            server.kill()
