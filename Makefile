# `make run` runs every case of the matrix on this machine, `make test` the whole test suite. Both bring their own
# environment: .venv, installed once and again only when pyproject.toml or constraints.txt change.
# Another interpreter: make PYTHON=python3.13 test (after `make clean`).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test lint format clean

run: $(VENV)/installed
	$(BIN)/dsv4-matrix run

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n auto

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/dsv4-matrix check
	$(BIN)/dsv4-matrix table --check
	$(BIN)/zizmor --offline --quiet .github/workflows

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/dsv4-matrix table --write

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"{sys.executable} is Python {v[0]}.{v[1]}; 3.11 or later is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-test: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable '.[test]'
	@touch $@ $(VENV)/installed
