# Everything runs in an environment that make itself creates in $(VENV); only python3 (>= 3.10) is assumed.
# To run in an interpreter that has everything already, name it: make test-gpu PY=python3
PYTHON ?= python3
VENV   ?= .venv

ifdef PY
environment = @:
else
PY := $(VENV)/bin/python
environment = @$(PYTHON) tools/environment.py $(1) --venv $(VENV)
endif
OLDEST := $(VENV)-oldest
# Test processes: one a core, a few on a machine with a GPU (tests/conftest.py)
PARALLEL ?= -n auto --dist worksteal

.PHONY: help demo install test test-gpu install-oldest test-oldest bench tables lint format clean

help:
	@echo "make demo      quantize a real sentence encoder and compare its embeddings (GPU if usable, else CPU)"
	@echo "make test      every test that this machine can run; kernels are compiled even without a GPU"
	@echo "make test-gpu  only the tests that need a CUDA device; fails without one"
	@echo "make test-oldest  tests of the core, with the oldest versions that pyproject.toml allows"
	@echo "make bench     measure on this machine, one JSON row a case, into bench/results/"
	@echo "make tables    rewrite the README's performance tables from bench/results/"
	@echo "make lint      ruff and mypy"

demo:
	$(call environment,demo)
	$(PY) -m examples.minilm

install:
	$(call environment,test)

test:
	$(call environment,test)
	$(PY) -m pytest $(PARALLEL)

test-gpu:
	$(call environment,test)
	$(PY) -m pytest $(PARALLEL) -m gpu --require-gpu

install-oldest:
	@$(PYTHON) tools/environment.py oldest --venv $(OLDEST)

test-oldest: install-oldest
	$(OLDEST)/bin/python -m pytest $(PARALLEL) -m "not gpu and not slow" tests/facts tests/cpu tests/cli tests/checkpoint tests/interop

bench:
	$(call environment,test)
	$(PY) -m bench

tables:
	$(call environment,test)
	$(PY) -m bench.make_tables

lint:
	$(call environment,test)
	$(PY) -m ruff check --output-format concise .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format:
	$(call environment,test)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) $(VENV)-install.log $(OLDEST) $(OLDEST)-install.log out build dist
