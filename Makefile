# The commands of Evenkeel. `make demo` and `make test` need Python, pip and make, nothing else.
PYTHON ?=
EXTRA ?=
VENV ?= .venv
BIN := $(VENV)/bin
DATA ?=
MINUTES ?= 30
KILLS ?= 100
# Tests wait for processes and disks: four keep two cores busy.
WORKERS ?= 4
# The longer forms of tests that are marked `long`.
LONG = EVENKEEL_TEST_HOSTS=1 HYPOTHESIS_PROFILE=long EVENKEEL_SCHEMA_EXAMPLES=200 EVENKEEL_TEST_CANCELS=500 EVENKEEL_TEST_KILLS=200 \
	EVENKEEL_TEST_SWITCHES=2000 EVENKEEL_TEST_LOAD_SECONDS=300 EVENKEEL_TEST_OUTAGE_SECONDS=300 \
	EVENKEEL_TEST_NODES=1 EVENKEEL_TEST_PAPERS=1 EVENKEEL_TEST_EVERY_POINT=1 EVENKEEL_TEST_DEMO_ROWS=200000 EVENKEEL_TEST_VICTIMS="rank raylet gcs_server driver stopped everything"
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
# Where the environment forbids Python to keep what it compiled, each of hundreds of processes compiles all of it again.
export PYTHONDONTWRITEBYTECODE :=
# Not --quiet: it leaves out warnings, which --strict then does not see.
SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
BENCHMARKS = ctr_peers $(filter-out __init__ hosts two_trees,$(basename $(notdir $(wildcard benchmarks/*.py))))

.PHONY: help setup demo test test-fast test-long test-hosts test-containers check check-types check-tests check-imports check-files check-site check-audit docs pictures notebooks format serve bench soak chaos gpu-check gpu-package images dist sbom lock clean

help:  ## these lines
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup:  ## make .venv from the hash-pinned lock (EXTRA=cpu, cuda or cpu-torch-SERIES, else that of .venv; PYTHON=, VENV=: another Python's); does nothing when it is up to date
	@VENV=$(VENV) EXTRA=$(EXTRA) PYTHON=$(PYTHON) deploy/setup.sh

demo: setup  ## train, publish, refresh, hold a broken refresh, fetch vectors; DATA=dataset.yaml for your own rows
	@$(BIN)/python examples/demo.py $(if $(DATA),--data $(DATA))

test: setup  ## what CI runs, in WORKERS processes at once (4); OPTIONS: of pytest
	@$(PYTEST) $(OPTIONS)

# These tests wait for nothing: two workers keep two cores busy, and each more would collect all tests once more.
test-fast: WORKERS = 2
test-fast: setup  ## no process, no PostgreSQL, no interpreted Triton, nothing slow: two to four minutes
	@$(PYTEST) -m "not process and not slow and not twin" $(OPTIONS)

test-long: setup  ## hours: 10,000 examples of each property, 200 requests of each route, many more kills, outages, the soak
	@$(LONG) $(PYTEST) -m "long or hypothesis or hosts" --timeout=0 -o faulthandler_timeout=0 $(OPTIONS)
	@$(MAKE) soak

test-hosts: setup  ## minutes, as root: runs on hosts of namespaces, which vanish and are cut off
	@EVENKEEL_TEST_HOSTS=1 $(BIN)/python -m pytest -m hosts $(OPTIONS)

test-containers: setup  ## as root with podman: an image of this code and an older one, the whole of docker-compose.yml, an upgrade
	@EVENKEEL_TEST_CONTAINERS=1 $(BIN)/python -m pytest -m containers $(OPTIONS)

check: setup  ## lint, format, types, import rules, compose schema, Dockerfile, the site of docs/, known vulnerabilities, that tests can be collected
	@$(MAKE) --no-print-directory --jobs=2 --output-sync check-types check-tests check-imports check-files check-site check-audit

check-types:
	@$(BIN)/mypy --num-workers 2

# What pytest makes of a test's assertions is kept: made here, beside the types, the tests' processes do not each make it.
check-tests:
	@$(BIN)/python -m pytest --collect-only -qq > /dev/null || $(BIN)/python -m pytest --collect-only -q

check-imports:
	@$(BIN)/lint-imports --config pyproject.toml

check-files:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m deploy.plain_english
	@$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	@$(BIN)/hadolint deploy/Dockerfile

check-site:
	@$(SITE) --site-dir build/checked_site

check-audit:
	@deploy/audit.sh $(BIN)/python

docs: setup  ## build the site of docs/ into build/site, with the reference that is read from the code; it needs no network
	@$(SITE)
	@echo build/site/index.html

pictures: setup  ## draw the pictures of docs/ and the plots of its reports
	@$(BIN)/python -m deploy.site

notebooks: setup  ## run examples/notebooks and keep what their cells print
	@$(BIN)/python -m deploy.site.notebooks

format: setup  ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

serve: setup  ## the service, which prints its address (PORT=8090: another port); it reads data sets below here
	@$(BIN)/evenkeel serve $(if $(PORT),--port $(PORT))

bench: setup  ## every benchmark by its defaults, at most three minutes each (--full has the figures of the reports); one JSON line per case
	@for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || exit 1; done

gpu-check:  ## on a machine with a GPU: tests, whole jobs, benchmarks, into docs/gpu/; GPU_PYTHON: with torch for CUDA
	@TRITON_INTERPRET=0 $(GPU_PYTHON) -m benchmarks.gpu

gpu-package:  ## what gpu-check needs of the last commit, for a machine that has no network: build/gpu-check.tar.gz
	@mkdir -p build && git archive -o build/gpu-check.tar.gz HEAD Makefile pyproject.toml benchmarks embeddings tests

soak: setup  ## half an hour of kills under load; ends in what was seen (MINUTES, KILLS)
	@$(BIN)/python -m tests.end_to_end.soak --minutes $(MINUTES) --kills $(KILLS)

chaos: setup  ## half an hour in which PostgreSQL, Redis, object storage, services and runs fail in turn; one JSON line (MINUTES=2: a look)
	@$(BIN)/python -m tests.end_to_end.chaos --minutes $(MINUTES)

images:  ## build the images (KINDS="cpu cuda") with podman, buildah or docker; tells sizes and biggest parts
	@deploy/images.sh

dist: setup  ## source distribution and wheel of this platform, and the client's wheel, into build/dist
	@rm -rf build/dist && mkdir -p build/dist
	@$(BIN)/python -c "import sys; sys.path.insert(0, 'deploy'); import build_backend; build_backend.build_sdist('build/dist')" > /dev/null
	@$(BIN)/python -m pip -q --disable-pip-version-check wheel --no-deps --no-build-isolation -w build/dist .
	@PYTHON=$(BIN)/python deploy/client/build.sh build/dist
	@ls build/dist

sbom: setup  ## what an installation is made of, as CycloneDX, into build/sbom.json
	@$(BIN)/python deploy/sbom.py deploy/requirements-cpu.lock build/sbom.json

lock:  ## resolve pyproject.toml into the locks again (needs uv on PATH)
	@deploy/lock.sh

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build
