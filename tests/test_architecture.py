"""Rules of the code base that no linter checks: purity, imports, names, error codes, packages of the wheel."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from dledger_core import errors

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dledger_core", "spark_connector", "jobs")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
LIBRARY = [path for path in MODULES if ROOT / "jobs" not in path.parents]

BANNED_WORDS = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
RAFT_MAY_IMPORT = {
    "__future__", "bisect", "collections", "dataclasses", "enum", "functools", "heapq", "itertools", "math", "operator",
    "typing", "msgpack", "dledger_core.config", "dledger_core.errors", "dledger_core.ids", "dledger_core.raft",
}  # fmt: skip


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[str, list[str], int]]:
    """Yield (module, names taken from it, line) of every import statement; relative ones only in the jobs."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, [], node.lineno
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                assert path not in LIBRARY, f"relative import in line {node.lineno}"
                package = path.relative_to(ROOT).parts[: -node.level]
                module = ".".join([*package, *filter(None, [module])])
            yield module, [alias.name for alias in node.names], node.lineno


def test_raft_core_imports_no_io() -> None:
    found = [
        f"{path.name}:{line} imports {module}"
        for path in (ROOT / "dledger_core/raft").rglob("*.py")
        for module, _, line in imports(path)
        if not any(module == allowed or module.startswith(allowed + ".") for allowed in RAFT_MAY_IMPORT)
    ]
    assert found == []


def test_imports_have_no_circle() -> None:
    names = {name_of(path) for path in MODULES}
    graph = {
        name_of(path): {
            target if target in names else module
            for module, taken, _ in imports(path)
            for target in ([f"{module}.{name}" for name in taken] or [module])
            if module.split(".")[0] in PACKAGES
        }
        for path in MODULES
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which contains the circle


def test_connector_and_jobs_import_public_names_and_lowest_layers() -> None:
    public = ("dledger_core", "dledger_core.rocketmq", "dledger_core.cli")
    lowest = ("archive", "checksum", "client", "config", "control", "digest", "environment", "ids", "record")
    allowed = {f"{name}.{taken}" for name in public for taken in importlib.import_module(name).__all__} | set(public)
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}.{name}"
        for path in MODULES
        if ROOT / "dledger_core" not in path.parents
        for module, taken, line in imports(path)
        if module.split(".")[0] == "dledger_core" and module not in {f"dledger_core.{each}" for each in lowest}
        for name in taken or [""]
        if f"{module}.{name}" not in allowed
    ]
    assert found == []


def test_errors_name_an_option_in_their_statement() -> None:
    """``where`` is a file, an address or a group."""
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in MODULES
        for call in ast.walk(tree_of(path))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id.endswith("Error")
        for where in call.args[1:2]
        if isinstance(where, ast.Constant) and str(where.value).startswith("--")
    ]
    assert found == []


def test_error_codes_are_unique_and_registered() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    coded = [kind for kind in kinds if isinstance(kind, type) and "code" in vars(kind)]
    assert [code for code, count in Counter(kind.code for kind in coded).items() if count > 1] == []
    assert [name for name, count in Counter(kind.name for kind in coded).items() if count > 1] == []
    for kind in coded:
        assert type(errors.error_from_wire(kind("what").to_wire())) is kind


def test_names_avoid_words_without_meaning() -> None:
    found = []
    for path in [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        named = [path.stem, path.parent.name, *(n.name for n in ast.walk(tree_of(path)) if isinstance(n, ast.ClassDef))]
        found += [f"{path.relative_to(ROOT)}: {name}" for name in named if BANNED_WORDS & words(name)]
    assert found == []


def test_test_names_have_at_most_80_characters() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.name.startswith("test_") and len(node.name) > 80
    ]
    assert found == []


def words(name: str) -> set[str]:
    spaced = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return set(spaced.split("_"))


def test_wheel_lists_every_package() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = {directory.replace("/", "."): name for name, directory in setuptools["package-dir"].items()}
    expected = set()
    for path in MODULES:
        package = name_of(path.parent / "__init__.py")
        top = next((each for each in names if f"{package}.".startswith(f"{each}.")), package)
        expected.add(names.get(top, top) + package.removeprefix(top))
    assert sorted(setuptools["packages"]) == sorted(expected)


def test_notebooks_contain_no_outputs() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs"), f"{path.name} contains outputs; run .venv/bin/nbstripout {path.name}"
            assert cell.get("execution_count") is None, f"{path.name} contains execution counts"


def test_import_of_core_loads_neither_server_nor_spark() -> None:
    code = "import sys, dledger_core; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    unwanted = ("dledger_core.server", "dledger_core.cli", "pyspark", "delta", "spark_connector")
    assert [name for name in done.stdout.split() if f"{name}.".startswith(tuple(f"{each}." for each in unwanted))] == []


def test_start_of_node_does_not_load_pandas() -> None:
    code = "import sys, dledger_core.cli.serve; print('pandas' in sys.modules, 'pyspark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"]


def test_public_names_exist() -> None:
    core = importlib.import_module("dledger_core")
    assert {"AsyncClient", "Client", "LocalCluster", "open_store"} <= set(core.__all__)
    assert [name for name in core.__all__ if not hasattr(core, name)] == []
    assert set(core.__all__) <= set(dir(core))


def test_tests_and_mutations_named_in_comments_exist() -> None:
    """A comment that says which test shows its rule would mislead after the test's name has changed."""
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    tests = {name for text in texts for name in re.findall(r"def (test_\w+)\(", text)}
    mutations = set(re.findall(r"^= (.+?) \| ", (ROOT / "tests/sim/mutations.diff").read_text(), re.MULTILINE))
    found = []
    for path in MODULES:
        lines = [line.strip().removeprefix("#").strip() for line in path.read_text().split("\n") if "#" in line]
        comments = " ".join(lines)
        found += [
            f"{path.relative_to(ROOT)}: {name}"
            for name in re.findall(r"\b(test_\w+)\b(?!\.py)", comments)
            if name not in tests
        ]
        found += [
            f"{path.relative_to(ROOT)}: {name}"
            for name in re.findall(r'mutation "(.+?)"', comments)
            if name not in mutations
        ]
    assert found == []
