PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-newest lint clean

demo: $(VENV)/.demo  ## install, then let the bundled model answer a few prompts
	$(BIN)/dgemma generate --seed 1 \
	  "$$(printf 'Solve this sudoku:\n1...\n..3.\n.4..\n...2')" \
	  "Reverse this list: 12 7 93 4 55 8" "Reverse q w e r t y"

test: $(VENV)/.test lint test-newest  ## what CI runs
	$(BIN)/python -m pytest

test-newest:  ## the fast tests on Python 3.12 with the newest jax
	./.ci/newest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .venv312 build dist *.egg-info
