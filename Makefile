PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

.PHONY: demo test test-newest soak gpu-offline gpu-aot lint docs notebooks clean

demo: $(VENV)/.demo  ## install, then watch a sudoku being solved and lists reversed
	$(BIN)/python -m dgemma_jax.demo

test: $(VENV)/.test lint test-newest  ## what CI runs
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test-newest:  ## what a new jax may break, on Python 3.12 with the newest
	./.ci/newest

soak: $(VENV)/.test  ## the engine's and the server's tests with full counts; the output is kept
	$(BIN)/python -m pytest --soak -v tests/test_slots.py tests/test_engine.py tests/test_engine_strain.py \
	  tests/test_batch.py tests/test_batch_killed.py tests/serve/test_real_engine.py tests/serve/test_openapi.py \
	  tests/devices | grep --line-buffered -v '^rootdir' | tee benchmarks/results/soak.txt

gpu-offline: .venv-gpu/.done  ## the GPU kernels' machine code and CUDA programs, on a machine without a GPU
	JAX_PLATFORMS=cpu .venv-gpu/bin/python -m pytest -m gpu_offline -rs

gpu-aot: .venv-gpu-aot/.done  ## the 26B programs compiled for GPUs that are not there: memory, copies, kernels
	.venv-gpu-aot/bin/python -m pytest -m gpu_aot -rs -s tests/gpu_aot

lint: $(VENV)/.test  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.test  ## the documentation, into site/
	$(BIN)/mkdocs build --strict

notebooks: $(VENV)/.test  ## run them and store what they print
	$(BIN)/python notebooks/execute.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

.venv-gpu/.done: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --editable '.[test,triton]' jax==0.10.2
	.venv-gpu/bin/python -m pip install --quiet --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2
	touch $@

.venv-gpu-aot/.done: pyproject.toml
	python3.12 -m venv .venv-gpu-aot
	.venv-gpu-aot/bin/python -m pip install --quiet --editable . jax==0.11.2 'beartype>=0.22' 'pytest>=8'
	.venv-gpu-aot/bin/python -m pip install --quiet --no-deps jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2 \
	  nvidia-cuda-nvcc nvidia-nvvm
	touch $@

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .venv312 .venv-gpu .venv-gpu-aot build dist site *.egg-info
