# Every target makes .venv and installs what it needs, once; the stamps notice when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CODE   := $(wildcard hf_private tests recipes)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow quality style bench bench-all mutants clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.all  ## everything a contributor needs

demo: $(VENV)/.demo  ## a private fine-tune from start to card, offline, in about three minutes
	$(BIN)/hf-private demo

test: $(VENV)/.all  ## the tests and doctests, in less than ten minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-slow: $(VENV)/.all  ## the tests that take minutes each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

quality: $(VENV)/.ruff  ## lint and format, looking only
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

style: $(VENV)/.ruff  ## lint and format, repairing
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: $(VENV)/.all  ## speed and memory in the headline settings, in less than fifteen minutes
	$(BIN)/python recipes/benchmark.py

bench-all: $(VENV)/.all  ## speed and memory over the whole grid
	$(BIN)/python recipes/benchmark.py --all

mutants: $(VENV)/.all  ## put real privacy bugs into the code and count how many the tests catch
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutations

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[demo]"
	@touch $@

$(VENV)/.all: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[dev]"
	@touch $@ $(VENV)/.demo $(VENV)/.ruff

$(VENV)/.ruff: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) ruff
	@touch $@
