# Everything here sets itself up: on a machine with Python 3.11+, g++ and a network, `make demo` and `make test` just run.
ENGINE ?= vllm
VENV ?= .venv$(patsubst %,-%,$(filter-out vllm,$(ENGINE)))
PY = $(VENV)/bin/python
JOBS ?= 2
PYTEST = $(PY) -m pytest -q
# Builds are kept by content, for all checkouts of a machine (tests/conftest.py names the same folder).
CACHE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tk-serving/tests
export TK_SERVING_SIMULATOR_CACHE ?= $(CACHE)/simulator
export TILELANG_CACHE_DIR ?= $(CACHE)/tilelang
export TILELANG_PRINT_ON_COMPILATION ?= 0

.PHONY: help setup demo test lint types unit ring2 engine sglang transformers docs images prebuild gpu clean

help:  ## list the targets
	@grep -E '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup:  ## make the virtual environment (done by the other targets when needed); ENGINE=sglang makes that of SGLang
	@PYTHON="$(PYTHON)" tools/setup.sh $(VENV) $(ENGINE)

demo: setup  ## serve a tiny DeepSeek-V3 with and without the flag and compare; ENGINE=sglang on SGLang
	@$(PY) -m tk_serving.cli demo --engine $(ENGINE) $(if $(SIMULATE),--simulate)

# An engine's start is mostly single-threaded, so the engines run beside the rings. SGLang's environment is made there.
test: setup lint  ## everything that needs no GPU; the last lines name the stages that failed
	@$(PY) tools/stages.py unit,ring2 types,engine,sglang

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup
	$(PY) -m mypy

unit: setup  ## ring 1: contracts and references against the specification
	$(PYTEST) -n $(JOBS) tests --ignore tests/ring2 -m "not gpu and not engine and not compile"

ring2: setup  ## ring 2: the generated CUDA, simulated on the CPU and compiled for every architecture
	$(PYTEST) -n $(JOBS) tests/ring2 -m "not gpu and not engine"

engine: setup  ## vLLM on this CPU
	$(PYTEST) tests --ignore tests/sglang -m "engine and not gpu"

sglang: override ENGINE = sglang
sglang: override VENV = .venv-sglang
sglang: setup  ## SGLang on this CPU: layers and the engine, in an environment of its own
	$(PYTEST) tests/sglang -m "not gpu"

transformers: setup  ## the transformers patches on every tested version of transformers (minutes for each)
	$(PY) tests/transformers/matrix.py

docs: setup  ## write the generated sections of the documentation
	$(PY) tools/docs.py

images: setup  ## build the CPU variant of an engine's image and ask it (root, buildah, debootstrap; ten minutes)
	$(PY) tools/images.py $(ENGINE)

prebuild:  ## compile what ring 3 launches, in parallel (needs nvcc, no GPU)
	$(PY) tools/prebuild.py

gpu: prebuild  ## ring 3, on a GPU host: the kernels against the references on the device
	$(PYTEST) tests/gpu -m gpu $(if $(RECORD),--record $(RECORD))

clean:  ## remove the environment and all caches
	rm -rf .venv .venv-sglang .cache $(CACHE) dist build .pytest_cache .mypy_cache .ruff_cache
