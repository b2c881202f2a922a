"""Coverage-guided fuzzing of one target, with atheris (libFuzzer): ``python -m tests.fuzz TARGET --seconds 300``.

Inputs that reach new code are kept in the corpus directory. An input that fails is written to ``crash-…`` there, and
its path, the traceback and the command to run it again are printed. Without a target: the names of all.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import tempfile
import traceback
from pathlib import Path

PREFIX = "dledger_core"
INPUT_BYTES_MAX = 16 << 10


def run_once(target: str, paths: list[Path]) -> None:
    """Run single inputs, to reproduce an error."""
    from tests.fuzz.catalog import TARGETS, inputs_of

    inputs_of(target)
    for path in paths:
        TARGETS[target].run(path.read_bytes())
        sys.stdout.write(f"{path}: passed\n")


def fuzz(target: str, seconds: int, corpus: Path) -> None:
    """Does not return: libFuzzer ends the process."""
    try:
        atheris = importlib.import_module("atheris")
    except ImportError:
        sys.exit("coverage-guided fuzzing needs atheris: pip install atheris")
    with atheris.instrument_imports(include=[PREFIX]):
        from tests.fuzz.catalog import TARGETS, inputs_of
    run = TARGETS[target].run

    def once(data: bytes) -> None:
        try:
            run(data)
        except BaseException:
            traceback.print_exc()
            raise

    options = [f"-max_total_time={seconds}", f"-max_len={INPUT_BYTES_MAX}", f"-artifact_prefix={corpus}/"]
    options += ["-timeout=60", "-rss_limit_mb=4096", "-print_final_stats=1", "-reload=0"]
    sys.stderr.write(f"again: python -m tests.fuzz {target} --run {corpus}/crash-...\n")
    with tempfile.TemporaryDirectory() as known:
        for name, data in inputs_of(target).items():
            (Path(known) / name).write_bytes(data)
        atheris.Setup([sys.argv[0], *options, str(corpus), known], once)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", help="name of the target [default: print the names]")
    parser.add_argument("--seconds", type=int, default=60, help="seconds to run [default: 60]")
    parser.add_argument("--corpus", type=Path, help="directory of new inputs [default: a new temporary one]")
    parser.add_argument("--run", type=Path, nargs="+", help="run these inputs once, without atheris")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if asked.target is None:
        from tests.fuzz.catalog import TARGETS

        sys.stdout.write("\n".join(TARGETS) + "\n")
    elif asked.run:
        run_once(asked.target, asked.run)
    else:
        corpus = asked.corpus or Path(tempfile.mkdtemp(prefix=f"fuzz-{asked.target}-"))
        corpus.mkdir(parents=True, exist_ok=True)
        fuzz(asked.target, asked.seconds, corpus)


if __name__ == "__main__":
    main()
