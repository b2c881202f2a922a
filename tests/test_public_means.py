"""Public means only: no private part of Spark, Py4J, Delta, PySpark, CPython or libc, and no process-wide switch.

Python is checked by its syntax tree, other files and the names of Java classes by their text.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("dledger_core", "spark_connector", "jobs", "notebooks", "tests", "benchmarks", ".ci", "Makefile", "*.md")
TEXT = frozenset({".py", ".md", ".ipynb", ".xml", ".properties", ".toml", ""})

ALLOWED: Final = {
    # The pip package of Spark has no start-master.sh, start-worker.sh and start-connect-server.sh, which run these.
    "org.apache.spark.deploy.master.Master",
    "org.apache.spark.deploy.worker.Worker",
    "org.apache.spark.sql.connect.service.SparkConnectServer",
}
"""At most five, each with the public way that is missing."""

DOCUMENTED: Final = {"org.apache.spark.sql.delta.catalog.DeltaCatalog", "org.apache.spark.SparkException"}
"""Java classes that a guide of Delta or Spark tells users to set or to expect."""
JAVA_CLASS: Final = re.compile(r"org\.apache\.spark\.[\w.$]+\w")
SWITCHES: Final = re.compile(
    r"-XX:|\b(?:mallopt|ctypes|unraisablehook|pthread_kill|setswitchinterval|setcheckinterval|OPENBLAS_NUM_THREADS"
    r"|LD_PRELOAD|JDK_JAVA_OPTIONS|JAVA_TOOL_OPTIONS|SPARK_DIST_CLASSPATH|SPARK_SUBMIT_OPTS)\b"
    r"|\bgc\.(?:freeze|unfreeze|disable|set_threshold)\b|\bsys\.(?:stdout|stderr|stdin)\s*=(?!=)"
)
SHORT_LIVED: Final = frozenset({"tests/support/spark_jvm.py", ".ci/spark-classes"})
"""The only files that set options of JVMs: of those that live for a test. No program of a user has them."""
FOREIGN: Final = {
    "_jvm", "_jsc", "_sc", "_jsparkSession", "_jdf", "_jdt", "_jreader", "_jwrite", "_jrdd", "_jconf", "_gateway",
    "_ensure_initialized", "_instantiatedSession", "_instantiatedContext", "_activeSession", "_active_spark_context",
    "_stackTrace", "_get_object_id", "_java_obj",
}  # fmt: skip
"""Well-known private names of the other projects; this project has some of the same names, in other files."""
PRIVATE_TEXT: Final = re.compile(rf"\.(?:{'|'.join(sorted(FOREIGN, key=len, reverse=True))})\b")
NAMED_TUPLES: Final = frozenset({"_asdict", "_replace", "_fields", "_make"})
PYTHON: Final = frozenset({("os", "_exit")})
"""Names with an underscore that Python's documentation describes."""
DISPLAYED: Final = frozenset({"_repr_html_", "_repr_mimebundle_"})
"""The same of IPython's."""
SPARK_MODULES: Final = re.compile(
    r"(?:pyspark(?:\.(?:errors|taskcontext"
    r"|sql(?:\.(?:types|functions|datasource|window|streaming(?:\.(?:datasource|listener|query))?))?))?"
    r"|delta(?:\.(?:tables|pip_utils))?|py4j(?:\.(?:protocol|java_gateway))?)"
)
"""Modules of Spark, Delta and Py4J that their references describe."""
OWN: Final = (
    "dledger_core",
    "spark_connector",
    "jobs",
    "dledger_jobs",
    "tests",
    "benchmarks",
    "notebooks",
    "__future__",
)


def files() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "--", *PLACES]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [ROOT / name for name in listed if "/testdata/" not in name and "/regressions/" not in name]
    return [path for path in found if path.suffix in TEXT and path.is_file() and path != Path(__file__).resolve()]


def defined(tree: ast.AST) -> Iterator[str]:
    """Yields the names that a module gives to what it defines: functions, classes, variables, attributes, keywords."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.alias(asname=str(name)) | ast.arg(arg=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def violations_in_python(text: str, own: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yields (line, offence) of a module; ``own`` are the names that any module of this project defines."""
    tree = ast.parse(text)
    mine = frozenset(defined(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names, lineno=line):
                yield from ((line, alias.name) for alias in names if not public_module(alias.name))
            case ast.ImportFrom(module=str(module), level=0, names=names, lineno=line):
                if not public_module(module):
                    yield line, module
                elif not module.startswith(OWN):
                    yield from ((line, f"{module}.{alias.name}") for alias in names if private(alias.name))
            case ast.Attribute(value=value, attr=name, lineno=line) if private(name):
                if not public_attribute(value, name, mine, own):
                    yield line, f".{name}"
            case ast.Call(func=function, args=[_, ast.Constant(value=str(name)), *_], lineno=line) if private(name):
                called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                if called in {"getattr", "setattr", "hasattr", "delattr"} and not known(name, mine, own):
                    yield line, f"{called} {name}"


def public_module(name: str) -> bool:
    root, _, rest = name.partition(".")
    if root in OWN:
        return True
    if root in {"pyspark", "delta", "py4j"}:
        return SPARK_MODULES.fullmatch(name) is not None
    return not any(private(part) for part in (root, *rest.split(".")))


def public_attribute(value: ast.expr, name: str, mine: frozenset[str], own: frozenset[str]) -> bool:
    if isinstance(value, ast.Name) and (value.id in {"self", "cls"} or (value.id, name) in PYTHON):
        return True
    return name in NAMED_TUPLES or known(name, mine, own)


def known(name: str, mine: frozenset[str], own: frozenset[str]) -> bool:
    """Whether a private name is this project's; one that another project has too must be defined in the same file."""
    return name in mine if name in FOREIGN else name in own


def violations_in_text(text: str, *, python: bool) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        for found in JAVA_CLASS.finditer(line):
            if found[0] not in DOCUMENTED | ALLOWED:
                yield number, found[0]
        yield from ((number, found[0]) for found in SWITCHES.finditer(line))
        if not python:
            yield from ((number, found[0]) for found in PRIVATE_TEXT.finditer(line))


def violations(text: str, *, python: bool, own: frozenset[str] = frozenset()) -> list[tuple[int, str]]:
    found = list(violations_in_text(text, python=python))
    return sorted([*found, *violations_in_python(text, own)] if python else found)


def test_no_file_uses_private_parts_or_process_wide_switches() -> None:
    texts = {path: path.read_text() for path in files()}
    own = frozenset(name for path, text in texts.items() if path.suffix == ".py" for name in defined(ast.parse(text)))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {offence}"
        for path, text in texts.items()
        for line, offence in violations(text, python=path.suffix == ".py", own=own)
        if str(path.relative_to(ROOT)) not in SHORT_LIVED or offence not in ("-XX:", "SPARK_SUBMIT_OPTS")
    ]
    assert found == []


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of each private name that a module takes from an object or another module."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, lineno=line) if private(name):
                yield line, name
            case ast.ImportFrom(module=str(module), names=names, lineno=line):
                directory = ROOT.joinpath(*module.split("."))
                found = [alias.name for alias in names if private(alias.name)]
                yield from ((line, name) for name in found if not (directory / f"{name}.py").exists())
            case ast.Call(func=function, args=arguments, lineno=line):
                called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                texts = [each.value for each in arguments[:2] if isinstance(each, ast.Constant)]
                if called in {"getattr", "setattr", "hasattr", "delattr"} and texts:
                    name = str(texts[0]).rpartition(".")[2]
                    yield from [(line, name)] if private(name) else []


def own_private_names(text: str) -> list[tuple[int, str]]:
    """Returns (line, name) of each private name of a module that the module does not define itself."""
    tree = ast.parse(text)
    known = NAMED_TUPLES | DISPLAYED | {name for _, name in PYTHON} | set(defined(tree))
    return [(line, name) for line, name in private_names(tree) if name not in known]


def test_tests_and_benchmarks_use_only_private_names_of_their_own_file() -> None:
    """A test of a private part breaks when the part is moved, and passes when what it stands for is wrong."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in ("tests", "benchmarks")
        for line, name in own_private_names(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("log._appender.truncate(0, 1)", 1),
        ("self._processes.clear()", 1),
        ("from dledger_core.recovery import _act", 1),
        ("monkeypatch.setattr(recovery, '_act', act)", 1),
        ("monkeypatch.setattr('dledger_core.recovery._act', act)", 1),
        ("self._own = other._own", 0),
        ("later = key._replace(run_id='later')", 0),
        ("from jobs import _session", 0),
        ("monkeypatch.setattr(recovery, 'decide', decide)", 0),
    ],
)
def test_private_names_of_other_files_are_counted(line: str, count: int) -> None:
    assert len(own_private_names(f"def f(self):\n    {line}\n")) == count


def test_allowed_names_are_few_and_used() -> None:
    assert len(ALLOWED) <= 5
    texts = [path.read_text() for path in files()]
    assert [name for name in ALLOWED if not any(name in text for text in texts)] == []


@pytest.mark.parametrize(
    "line",
    [
        "spark._jvm.System.gc()",
        "SparkContext._ensure_initialized()",
        "options = builder._options",
        "gateway = getattr(SparkContext, '_gateway', None)",
        "monkeypatch.setattr(sys, 'unraisablehook', look)",
        "monkeypatch.setattr(threading, '_shutdown', look)",
        "text = error._stackTrace",
        "import ctypes",
        "import _thread",
        "import pyspark.daemon",
        "from pyspark.core.context import SparkContext",
        "from pyspark.sql.classic.column import Column",
        "from concurrent.futures import _base",
        "from concurrent.futures.thread import _threads_queues",
        "frame = sys._getframe()",
        "gc.freeze()",
        "sys.stdout = stream",
        "signal.pthread_kill(thread, number)",
        "os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')",
        "options = '-XX:TieredStopAtLevel=1'",
        "name = 'org.apache.spark.sql.delta.DeltaLog'",
        "name = 'org.apache.spark.deploy.SparkSubmit$'",
    ],
)
def test_checker_finds_private_parts_in_python(line: str) -> None:
    assert violations(f"def f():\n    {line}\n", python=True, own=frozenset({"_seen"}))


@pytest.mark.parametrize(
    "line",
    [
        "self._jvm = 1",
        "row = pair._replace(left=1)",
        "os._exit(1)",
        "found = other._seen",
        "from jobs._session import spark_session",
        "from pyspark.sql.datasource import DataSource",
        "sys.stdout.write('text')",
        "name = 'org.apache.spark.sql.delta.catalog.DeltaCatalog'",
        "package = 'org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0'",
    ],
)
def test_checker_accepts_public_means_in_python(line: str) -> None:
    assert violations(f"def f(self):\n    {line}\n", python=True, own=frozenset({"_seen"})) == []


@pytest.mark.parametrize(
    ("line", "offences"),
    [
        ("export JDK_JAVA_OPTIONS=-XX:+UseSerialGC", 2),
        ("`spark._jsparkSession`", 1),
        ("--conf spark.sql.x=org.apache.spark.sql.execution.streaming.X", 1),
        ("spark-class org.apache.spark.deploy.master.Master", 0),
        ("--conf spark.executorEnv.MALLOC_TRIM_THRESHOLD_=134217728", 0),
    ],
)
def test_checker_counts_private_parts_in_text(line: str, offences: int) -> None:
    assert len(violations(line, python=False)) == offences
