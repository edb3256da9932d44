# make demo   the whole pipeline on this machine, from raw text to the report
# make test   lint, types, tests
# Both make .venv from the pinned constraints first if it is missing.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
BFCL   := bfcl-eval==2026.3.23

.PHONY: install demo test lint format clean

install: $(READY)

# torch, ninja and py-cpuinfo come first: DeepSpeed's setup imports them.
# bfcl-eval comes without its pins: they contradict ours, and only its data, its
# ast_checker and its type converters are used (gatewright/bfcl.py).
$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 11) else "Python 3.11 is needed: make PYTHON=/path/to/python3.11")'
	@echo "installing into $(VENV) (about 2 GB; one to three minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) setuptools wheel
	@$(PIP) torch==2.13.0 ninja py-cpuinfo numpy
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation --editable '.[dev]'
	@$(PIP) --no-deps $(BFCL)
	@touch $(READY)

demo: $(READY)
	@$(BIN)/python -m slurm.pipeline slurm/pipelines/demo.toml --local

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One process per core; each test process computes on one thread, which is faster than
# two processes that fight for both cores.
test: $(READY) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache
