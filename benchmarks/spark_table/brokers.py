"""Three Kafka 4 brokers on loopback, with jars that Maven fetches on first use."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path

from dledger_core.cluster import free_ports
from dledger_core.environment import find_java
from dledger_core.errors import ConfigError

CACHE = Path.home() / ".cache" / "dledger-kafka"
# Versions as of 2026-11. Spark's connector 4.2.0 needs a token provider that is not published everywhere in 4.2.0;
# that module holds delegation tokens only, nothing that a record passes.
SERVER = (
    ("org.apache.kafka", "kafka_2.13", "4.3.1"),
    ("org.apache.kafka", "kafka-tools", "4.3.1"),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"),
)
SPARK = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0"),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.1.0-preview1"),
    ("org.apache.kafka", "kafka-clients", "3.9.2"),
    ("org.apache.commons", "commons-pool2", "2.13.1"),
)
COUNT = 3
START_S = 60.0
PROPERTIES = """\
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
default.replication.factor=3
min.insync.replicas=2
offsets.topic.replication.factor=3
transaction.state.log.replication.factor=3
auto.create.topics.enable=false
message.max.bytes=2097152
"""
LOGGING = "status=error\nrootLogger.level=error\n"


class MissingError(Exception):
    """Kafka is not available here, with the reason."""


def java(program: str = "java") -> str:
    """Return the path of a program of Java.

    Raises:
        MissingError: there is no Java.
    """
    try:
        return str(find_java() / "bin" / program)
    except ConfigError as error:
        raise MissingError(str(error)) from None


def resolve(folder: Path, artifacts: tuple[tuple[str, str, str], ...], *, alone: bool = False) -> Path:
    """Return a directory of jars, into which Maven fetches them on first use.

    Args:
        folder: the directory; the versions become part of its name.
        artifacts: (group, name, version) of each.
        alone: without what they depend on.

    Raises:
        MissingError: there is no Maven, or it cannot fetch them.
    """
    folder = folder.with_name("-".join([folder.name, *(version for _, _, version in artifacts)]))
    if folder.is_dir():
        return folder
    maven = shutil.which("mvn")
    if maven is None:
        raise MissingError("no Maven on PATH to fetch jars with (Debian, Ubuntu: apt-get install maven)")
    nothing_else = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
    wanted = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version>"
        f"{nothing_else if alone else ''}</dependency>"
        for group, name, version in artifacts
    )
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    pom = partial / "pom.xml"
    pom.write_text(
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion><groupId>bench</groupId>'
        f"<artifactId>jars</artifactId><version>1</version><dependencies>{wanted}</dependencies></project>"
    )
    goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={partial}"]
    done = subprocess.run([maven, "-B", "-q", "-f", str(pom), *goal], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in done.stdout.splitlines() if "ERROR" in line), done.stderr.strip())
        raise MissingError(f"Maven cannot fetch {artifacts[0][1]}: {reason[:300]}")
    return partial.rename(folder)


class Brokers:
    """Three brokers that are controllers too; a context manager.

    Args:
        folder: for files and logs.
        jars: directory of the servers' jars; None = Maven fetches them, and ``spark_jars``, on first use.
    """

    def __init__(self, folder: Path, jars: Path | None = None) -> None:
        self._folder = folder
        self._java = java()
        self.spark_jars: list[Path] = []
        if jars is None:
            jars = resolve(CACHE / "server", SERVER)
            self.spark_jars = sorted(resolve(CACHE / "spark", SPARK, alone=True).glob("*.jar"))
        self._jars = jars
        self._processes: list[subprocess.Popen[bytes]] = []
        ports = free_ports(2 * COUNT)
        self._ports, self._controllers = ports[:COUNT], ports[COUNT:]

    @property
    def address(self) -> str:
        """The address for clients."""
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def __enter__(self) -> Brokers:
        (self._folder / "log4j2.properties").write_text(LOGGING)
        voters = ",".join(f"{node + 1}@127.0.0.1:{port}" for node, port in enumerate(self._controllers))
        identity = (
            urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
        )  # an option of the tool otherwise
        formatting = []
        try:
            for node, (port, controller) in enumerate(zip(self._ports, self._controllers, strict=True)):
                config = self._folder / f"{node}.properties"
                data = self._folder / f"data{node}"
                fields = {"node": node + 1, "voters": voters, "port": port, "controller": controller, "data": data}
                config.write_text(PROPERTIES.format(**fields))
                formatting.append(self.start("kafka.tools.StorageTool", "format", "-t", identity, "-c", str(config)))
            codes = [process.wait() for process in formatting]
            if any(codes):
                raise MissingError("kafka.tools.StorageTool failed")
            for node in range(COUNT):
                config = self._folder / f"{node}.properties"
                command = [*self._command("1g"), "kafka.Kafka", str(config)]
                with (self._folder / f"{node}.log").open("wb") as log:
                    self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            self._await()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _command(self, heap: str) -> list[str]:
        logging = f"-Dlog4j2.configurationFile={self._folder / 'log4j2.properties'}"
        return [self._java, f"-Xms{heap}", f"-Xmx{heap}", logging, "-cp", f"{self._jars}/*"]

    def _await(self) -> None:
        deadline = time.monotonic() + START_S
        for port in self._ports:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise MissingError(f"the brokers do not start, see {self._folder}") from None
                    time.sleep(0.2)

    def run(self, tool: str, *arguments: str) -> None:
        """Runs one of Kafka's tools to its end."""
        done = subprocess.run([*self._command("256m"), tool, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise MissingError(f"{tool} failed: {(done.stderr or done.stdout).strip()[:300]}")

    def start(self, tool: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts one of Kafka's tools."""
        return subprocess.Popen([*self._command("256m"), tool, *arguments], stdout=subprocess.DEVNULL)

    def make_topic(self, name: str) -> None:
        """Makes a topic of one partition and three replicas."""
        where = ["--bootstrap-server", self.address, "--create", "--topic", name]
        self.run("org.apache.kafka.tools.TopicCommand", *where, "--partitions", "1", "--replication-factor", "3")
