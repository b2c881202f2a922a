"""The files of ``deploy/``: settings, unit, image and manifests say what the programs that read them accept."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dledger_core.cli.settings import ServeSettings, flag_of
from dledger_core.config import parse_peers
from tests.cli.command import run
from tests.support.machines import Machines, available

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SAMPLE = (DEPLOY / "dledger.toml").read_text()
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes/dledger.yaml").read_text()))
KEY = re.compile(r"^(# )?([a-z0-9-]+) = (.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that ``tls dev`` makes, with the certificate of n0 under the name that the sample has, too."""
    directory = tmp_path_factory.mktemp("certificates")
    peers = "n0-10.0.0.1:40911;n1-10.0.0.2:40911;n2-10.0.0.3:40911"
    run("tls", "dev", directory, "--peers", peers)
    for suffix in ("pem", "key"):
        shutil.copy(directory / f"n0.{suffix}", directory / f"node.{suffix}")
    return directory


def check(text: str, certificates: Path, *options: object) -> dict[str, str]:
    """Return the settings that ``serve`` reads from a file with this text; its certificates are elsewhere."""
    path = certificates / "dledger.toml"
    path.write_text(text.replace("/etc/dledger/tls", str(certificates)).replace("/etc/dledger", str(certificates)))
    shown: dict[str, str] = json.loads(run("serve", "--config", path, *options, "--check", "--format", "json").stdout)
    return shown


# --- settings --------------------------------------------------------------------------------------------------------


def test_sample_names_every_setting_once_with_its_help() -> None:
    names = [name for _, name, _ in KEY.findall(SAMPLE)]
    assert names == [flag_of(name) for name in ServeSettings.model_fields]
    text = " ".join(SAMPLE.replace("\n# ", " ").split())
    for name, field in ServeSettings.model_fields.items():
        assert " ".join(str(field.description).split()) in text, name


def test_sample_is_accepted_and_its_comments_have_the_defaults(certificates: Path) -> None:
    fields = {flag_of(name): field for name, field in ServeSettings.model_fields.items()}
    active = tomllib.loads(SAMPLE)
    lines = [
        f"{name} = {value}"
        for _, name, value in KEY.findall(SAMPLE)
        if name in active or fields[name].default not in (None, ())
    ]
    assert check("\n".join(lines), certificates) == check(SAMPLE, certificates)


def test_examples_of_sample_are_accepted(certificates: Path) -> None:
    text = KEY.sub(r"\2 = \3", SAMPLE).replace('["n0,n1", "orders=n2"]', '["n0,n1"]')
    lines = [line for line in text.splitlines() if not line.startswith(("commitlog", "fingerprint"))]
    assert check("\n".join(lines), certificates)["self-id"] == "n0"


# --- systemd ---------------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_unit_is_accepted_by_systemd(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd/dledger.service").read_text()
    program = f"{Path(sys.executable).parent}/dledger"
    (tmp_path / "dledger.service").write_text(text.replace("/opt/dledger/bin/dledger", program))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "dledger.service")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- image -----------------------------------------------------------------------------------------------------------


def instructions() -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage of the Containerfile."""
    stages: list[list[tuple[str, str]]] = []
    for line in CONTAINERFILE.splitlines():
        name, _, value = line.partition(" ")
        if name == "FROM":
            stages.append([])
        if name.isupper():
            stages[-1].append((name, value))
    return stages


def test_image_runs_as_a_user_with_a_volume_of_its_own() -> None:
    _, last = instructions()
    values = dict(last)
    assert values["USER"] == "10001:10001"
    assert values["VOLUME"] == "/var/lib/dledger"
    assert json.loads(values["ENTRYPOINT"]) == ["/opt/dledger/bin/dledger"]
    assert [name for name, _ in last].index("USER") > max(
        number for number, (name, _) in enumerate(last) if name == "RUN"
    )


def test_image_installs_only_locked_files() -> None:
    first, _ = instructions()
    installs = [value for name, value in first if name == "RUN" and "pip install" in value]
    assert [("--require-hashes" in each, "--no-deps --no-build-isolation" in each) for each in installs] == [
        (True, False),
        (False, True),
    ]


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[Any]:
    with Machines(("builder", "container"), tmp_path) as machines:
        yield machines


def fetch_locked(wheels: Path) -> None:
    """Download the files of the image's lock, whose hashes pip checks; a machine has no network."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps"]
    lock = DEPLOY / "requirements.lock"
    subprocess.run([*command, "--requirement", str(lock), "--dest", str(wheels)], check=True)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.skipif(not available(), reason="needs root, for namespaces")
def test_lines_of_containerfile_make_a_program_that_starts(builder: Machines, tmp_path: Path) -> None:
    first, last = instructions()
    build, container = builder["builder"], builder["container"]
    fetch_locked(tmp_path / "wheels")
    shutil.copytree(tmp_path / "wheels", build.root / "root/wheels")
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True).stdout
    for name, value in first:
        if name == "WORKDIR":
            build.run(f"mkdir -p {value}")
            work = value
        elif name == "COPY":
            *sources, target = value.split()
            for file in tracked.splitlines():
                if any(Path(file).is_relative_to(source) for source in sources) and (ROOT / file).is_file():
                    copied = build.root / work.lstrip("/") / file
                    copied.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / file, copied)
            assert target == "./" or [target] == sources, value
        elif name == "RUN":
            build.run(f"cd {work}\n{value}", PIP_FIND_LINKS="/root/wheels")
            # What other tests find there; an image has the locked files only.
            packages = build.root / "opt/dledger/lib"
            for link in packages.glob("python*/site-packages/packages.pth"):
                link.unlink()
    for name, value in last:
        if name == "COPY":
            source, target = value.removeprefix("--from=build ").split()
            shutil.copytree(build.root / source.lstrip("/"), container.root / target.lstrip("/"), symlinks=True)
        elif name == "RUN":
            container.run(value)
    values = dict(last)
    (program,) = json.loads(values["ENTRYPOINT"])
    as_user = f"setpriv --reuid={values['USER'].replace(':', ' --regid=')} --clear-groups"
    (container.root / "etc/dledger").mkdir()
    (container.root / "etc/dledger/dledger.toml").write_text(
        'peers = "n0-127.0.0.1:40911"\nself-id = "n0"\ndir = "/var/lib/dledger"\n'
    )
    command = " ".join([program, *json.loads(values["CMD"])])
    with container.start(f"cd {values['WORKDIR']}; exec {as_user} {command} --format json") as node:
        try:
            assert node.stdout is not None
            assert json.loads(node.stdout.readline())["node"] == "n0"
            out = container.run(f"{as_user} {program} append --peers n0-127.0.0.1:40911 --timeout 60 --format json one")
            assert json.loads(out)["entries"] == 1
        finally:
            container.power_off()


# --- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_manifest_fits_the_schema_of_kubernetes(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [manifest for manifest in MANIFESTS if manifest["kind"] == kind]
    return dict(found)


def test_settings_of_manifest_are_accepted_and_name_its_pods(certificates: Path) -> None:
    (text,) = of_kind("ConfigMap")["data"].values()
    options = ("--self-id", "n0", "--tls-cert", certificates / "n0.pem", "--tls-key", certificates / "n0.key")
    peers = check(text, certificates, *options)["peers"]
    stateful = of_kind("StatefulSet")
    name, service = stateful["metadata"]["name"], stateful["spec"]["serviceName"]
    (port,) = stateful["spec"]["template"]["spec"]["containers"][0]["ports"][:1]
    expected = [(f"n{i}", f"{name}-{i}.{service}", port["containerPort"]) for i in range(stateful["spec"]["replicas"])]
    assert [(peer.node_id, peer.host, peer.port) for peer in parse_peers(peers)] == expected
    job = of_kind("Job")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--peers={peers}" in job


def test_command_of_manifest_gives_each_pod_its_node() -> None:
    container = of_kind("StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    (script,) = container["args"]
    shown = script.replace("exec /opt/dledger/bin/dledger", "echo")
    assert shown != script
    done = subprocess.run(
        [*container["command"], shown], env={"HOSTNAME": "dledger-2"}, capture_output=True, text=True, check=True
    )
    words = done.stdout.split()
    given = dict(zip(words[1::2], words[2::2], strict=True))
    assert given["--self-id"] == "n2"
    assert [Path(given[name]).name for name in ("--tls-cert", "--tls-key")] == ["n2.pem", "n2.key"]


def test_probes_ask_the_second_port_of_the_settings() -> None:
    container = of_kind("StatefulSet")["spec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    (text,) = of_kind("ConfigMap")["data"].values()
    assert tomllib.loads(text)["http"] == f"0.0.0.0:{ports['http']}"
    assert {name: (probe["path"], probe["port"], probe["scheme"]) for name, probe in probes.items()} == {
        "startupProbe": ("/readyz", "http", "HTTPS"),
        "livenessProbe": ("/livez", "http", "HTTPS"),
        "readinessProbe": ("/readyz", "http", "HTTPS"),
    }


def test_nodes_start_at_once_and_are_found_before_they_are_ready() -> None:
    stateful, service, budget = of_kind("StatefulSet"), of_kind("Service"), of_kind("PodDisruptionBudget")
    assert stateful["spec"]["podManagementPolicy"] == "Parallel"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert budget["spec"]["maxUnavailable"] == 1
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    for selector in (service["spec"]["selector"], budget["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
        assert not selector.items() <= of_kind("Job")["spec"]["template"]["metadata"]["labels"].items()
