# The commands of Evenkeel. `make demo` and `make test` need python3.11, pip and make, nothing else.
PYTHON ?= python3.11
EXTRA ?= cpu
VENV := .venv
BIN := $(VENV)/bin
DATA ?=
MINUTES ?= 30
KILLS ?= 100
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
BENCHMARKS = $(filter-out __init__ harness peers baselines gpu gpu_tests gpu_kernels stability_tables ctr_tasks ctr_ours ctr_deepctr ctr_torchrec,$(basename $(notdir $(wildcard benchmarks/*.py))))

.PHONY: help setup demo test test-fast check format serve bench soak gpu-check lock clean

help:  ## these lines
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup:  ## make .venv from the hash-pinned lock (EXTRA=cpu or cuda); does nothing when it is up to date
	@EXTRA=$(EXTRA) PYTHON=$(PYTHON) deploy/setup.sh

demo: setup  ## train, publish, refresh, hold a broken refresh, fetch vectors; DATA=dataset.yaml for your own rows
	@$(BIN)/python examples/demo.py $(if $(DATA),--data $(DATA))

test: setup  ## the whole suite, its two halves at once; OPTIONS: of pytest
	@$(BIN)/python tests/halves.py $(OPTIONS)

test-fast: setup  ## no Ray, nothing slow, no whole service
	@$(BIN)/python -m pytest -m "not ray and not slow and not end_to_end"

check: setup  ## lint, format, types, import rules, compose schema, Dockerfile, known vulnerabilities
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --config pyproject.toml
	@$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	@$(BIN)/hadolint deploy/Dockerfile
	@deploy/audit.sh $(BIN)/python

format: setup  ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

serve: setup  ## the service on http://127.0.0.1:8080; it reads data sets below here and in ../shared/data
	@EVENKEEL_DATA_ROOTS="$${EVENKEEL_DATA_ROOTS:-.:../shared/data}" $(BIN)/evenkeel serve

bench: setup  ## every benchmark, one JSON line per case
	@for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || exit 1; done

gpu-check:  ## on a machine with a GPU: tests, whole jobs, benchmarks, into docs/gpu/; GPU_PYTHON: with torch for CUDA
	@TRITON_INTERPRET=0 $(GPU_PYTHON) -m benchmarks.gpu

soak: setup  ## half an hour of kills under load; ends in what was seen (MINUTES, KILLS)
	@$(BIN)/python tests/end_to_end/soak.py --minutes $(MINUTES) --kills $(KILLS)

lock:  ## resolve pyproject.toml into the two locks again (needs uv on PATH)
	@deploy/lock.sh

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build
