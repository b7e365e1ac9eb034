# Everything here sets itself up: on a machine with Python 3.11+, g++ and a network, `make demo` and `make test` just run.
VENV ?= .venv
PY := $(VENV)/bin/python
JOBS ?= 2
ENGINE ?= vllm
PYTEST := $(PY) -m pytest -q
export TK_SERVING_SIMULATOR_CACHE ?= $(CURDIR)/.cache/simulator
export TILELANG_CACHE_DIR ?= $(CURDIR)/.cache/tilelang
export TILELANG_PRINT_ON_COMPILATION ?= 0

.PHONY: help setup demo test lint types unit ring2 engine transformers gpu clean

help:  ## list the targets
	@grep -E '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup:  ## make the virtual environment (done by the other targets when needed)
	@PYTHON="$(PYTHON)" tools/setup.sh $(VENV) vllm

demo: setup  ## serve a tiny DeepSeek-V3 with and without the flag and compare
	@$(PY) -m tk_serving.cli demo --engine $(ENGINE) $(if $(SIMULATE),--simulate)

test: setup lint types unit ring2 engine  ## everything that needs no GPU

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup
	$(PY) -m mypy

unit: setup  ## ring 1: contracts and references against the specification
	$(PYTEST) -n $(JOBS) tests --ignore tests/ring2 -m "not gpu and not engine and not compile"

ring2: setup  ## ring 2: the generated CUDA, simulated on the CPU and compiled for every architecture
	$(PYTEST) -n $(JOBS) tests/ring2 -m "not gpu and not engine"

engine: setup  ## the real engines on this CPU
	$(PYTEST) tests -m "engine and not gpu"

transformers: setup  ## the transformers patches on every tested version of transformers (minutes for each)
	$(PY) tests/transformers/matrix.py

gpu:  ## ring 3, on a GPU host: the kernels against the references on the device
	$(PYTEST) tests/gpu -m gpu $(if $(RECORD),--record $(RECORD))

clean:  ## remove the environment and all caches
	rm -rf $(VENV) .cache dist build .pytest_cache .mypy_cache .ruff_cache
