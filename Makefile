# The project's commands, the same for people and for CI. `make demo` and `make test` fetch what they need first.
BIN := .venv/bin
READY := .venv/.installed
# Three workers: with two, the two cores wait for a fifth of the time. The order of the files is tests/conftest.py's.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder
UNIT := not spark and not integration and not notebook and not sim and not slow
export PYSPARK_PYTHON := $(CURDIR)/$(BIN)/python
export PYSPARK_DRIVER_PYTHON := $(PYSPARK_PYTHON)

# Hundreds of processes import the packages here: where bytecode may not be kept, each of them compiles all again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo notebooks test check quick lint jars snapshots coverage site bench soak clean

help:
	@echo 'make demo    the whole pipeline on 336,776 real flight events (ARGS="--keep DIR" and others are passed on)'
	@echo 'make notebooks  run the notebooks and write HTML pages to share to build/notebooks (DLEDGER_SOURCE=DIR|PEERS)'
	@echo 'make test    all checks and all tests, as CI runs them'
	@echo 'make quick   the two minutes of tests that catch most: core, files, network, seeds of the simulation'
	@echo 'make check   format, lint, types, imports, words, unit tests; under a minute'
	@echo 'make snapshots  accept the present texts as snapshots of the tests'
	@echo 'make coverage  the branches that the quick tests take, with a floor for each package'
	@echo 'make site    the guides and the reference of the public names as pages, in build/site'
	@echo 'make bench   the benchmarks of appends and of the store on this machine; tests/README.md has the others'
	@echo 'make soak    long runs: simulation with mutations, chaos, endurance, fuzzing; two and a half hours (MINUTES=60)'
	@echo 'make clean   remove caches and build outputs; .venv stays'

# Made again only when pyproject.toml is newer than the stamp, so that a second run starts at once and works offline.
$(READY): pyproject.toml
	@.ci/venv

demo: $(READY)
	@.ci/java .ci/spark $(BIN)/python jobs/demo.py $(ARGS)

PAGES := build/notebooks
notebooks: $(READY)
	@.ci/java .ci/spark $(BIN)/jupyter nbconvert --log-level ERROR --execute --to html --template page \
		--TemplateExporter.extra_template_basedirs=notebooks/templates --output-dir $(PAGES) notebooks/*.ipynb $(ARGS)
	@echo 'wrote $(PAGES)/*.html'

lint: $(READY)
	@$(BIN)/ruff format --check --quiet . || { echo 'error: run .venv/bin/ruff format .' >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@.ci/words

jars: $(READY)
	@.ci/java .ci/spark .ci/java-dledger .ci/porcupine .ci/jars .ci/spark-classes

# Checks take one core, and fetching jars waits for the network: on a fresh clone they run side by side.
test: $(READY)
	@$(MAKE) --no-print-directory -j2 lint jars
	@.ci/java .ci/chromium .ci/promtool .ci/scratch $(BIN)/python -m pytest $(WORKERS) --reruns 1 --reruns-delay 2 --rerun-show-tracebacks \
		--durations=30 --durations-min=4 $(ARGS)

check: lint
	@.ci/java $(BIN)/python -m pytest -q $(WORKERS) -m '$(UNIT)' $(ARGS)

# tests/conftest.py chooses them.
quick: $(READY)
	@$(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder -m quick $(ARGS)

# Review the difference with git afterwards.
snapshots: $(READY)
	@DLEDGER_SNAPSHOTS=accept $(BIN)/python -m pytest -q -k snapshot tests/cli/test_snapshots.py tests/jobs/test_audit_report.py

# With a floor for each package. Not part of `make test`: the reason is in the script.
coverage: $(READY)
	@.ci/java .ci/coverage $(ARGS)

site: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo 'wrote build/site/index.html'

bench: $(READY)
	@$(BIN)/dledger perf append $(ARGS)
	@$(BIN)/python -m benchmarks.bench_storage

# Every run continues its record (SOAK.jsonl), or starts from seeds that no earlier run had.
MINUTES := 60
soak: $(READY)
	@.ci/java .ci/spark .ci/java-dledger .ci/rocketmq .ci/jars $(BIN)/python -m pytest -q --soak -m soak
	@$(BIN)/python -m tests.sim --soak 10000000 --jobs 2
	@$(BIN)/python -m tests.chaos --minutes $(MINUTES) --record
	@.ci/java .ci/spark $(BIN)/python -m tests.chaos.connector --minutes 30 --record
	@$(BIN)/python -m benchmarks.endurance --minutes 30 --record
	@$(BIN)/python -c 'import atheris' 2>/dev/null || { echo 'fuzzing is left out: it needs $(BIN)/pip install atheris' >&2; exit 0; }; \
		for target in $$($(BIN)/python -m tests.fuzz); do $(BIN)/python -m tests.fuzz $$target --seconds $(MINUTES) || exit 1; done

clean:
	@rm -rf build dist dledger.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis \
		spark-warehouse metastore_db derby.log
	@find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +
