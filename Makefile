# Every target makes .venv and installs what it needs, once; the stamps notice when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CODE   := hf_private tests recipes

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-quantized test-machines quality style bench bench-all bench-peers growth zoo families mutants clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.all  ## everything a contributor needs

demo: $(VENV)/.demo  ## a private fine-tune from start to card, offline, in three to five minutes
	$(BIN)/hf-private demo

test: $(VENV)/.all  ## the tests and doctests, in less than ten minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-slow: $(VENV)/.notebook  ## the tests that take minutes each, the notebook among them
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

test-quantized: $(VENV)/.quantized  ## the tests of 4-bit and 8-bit bases, with the extra `quantized` (150 MB)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/gradients/test_quantized.py

test-machines: $(VENV)/.all  ## two machines as network namespaces: torchrun, FSDP2, a rank that dies; needs root and iproute2
	PYTHONPATH=. $(BIN)/python recipes/machines.py

quality: $(VENV)/.all  ## lint, format and types, without changing anything
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

style: $(VENV)/.all  ## repair lint and format
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: $(VENV)/.all  ## speed and memory in the headline settings, worst of three runs, in less than fifteen minutes
	$(BIN)/python recipes/benchmark.py --fresh
	OMP_NUM_THREADS=1 $(BIN)/python recipes/scaling.py --steps 3
	$(BIN)/python recipes/overview.py

bench-all: $(VENV)/.all  ## speed and memory of other models and lengths, in an hour; goes on where it was stopped
	$(BIN)/python recipes/benchmark.py --all --runs 1 --output benchmark_all

bench-peers: $(VENV)/.peers/.done  ## the headline settings for Opacus and Opake, in an environment of their own
	rm -f recipes/results/benchmark_peers.json
	for engine in opacus-hooks opacus-ghost opake; do \
		PYTHONPATH=. $(VENV)/.peers/bin/python recipes/benchmark.py --settings bert-8x128 gpt2untied-4x100 \
			--engines $$engine --runs 1 --output benchmark_peers || exit 1; \
	done

growth: $(VENV)/.all  ## how cost grows with length, batch, width, depth, rank, accumulation and dataset size
	$(BIN)/python recipes/growth.py

zoo: $(VENV)/.all  ## the sensitivity of every text architecture that DPTrainer accepts; goes on where it was stopped
	$(BIN)/python recipes/sensitivity.py

families: $(VENV)/.all  ## which architectures of transformers are exact; goes on where it was stopped
	OMP_NUM_THREADS=1 $(BIN)/python recipes/families.py

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
	@touch $@ $(VENV)/.demo

$(VENV)/.quantized: $(VENV)/.all
	$(PIP) --editable ".[quantized]"
	@touch $@

$(VENV)/.notebook: $(VENV)/.all
	$(PIP) --editable ".[notebook]"
	@touch $@

# Layered over .venv, so that peers run on the very same torch and may not change it.
$(VENV)/.peers/.done: $(VENV)/.all
	$(BIN)/python -m venv $(VENV)/.peers
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$($(VENV)/.peers/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth"
	$(VENV)/.peers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt opacus==1.6.0 opake==0.16.1
	@touch $@
