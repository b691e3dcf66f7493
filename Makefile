# Every target sets up .venv first; nothing outside the repository is changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: train test test-slow lint setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(STAMP)

train: $(STAMP)
	$(BIN)/penstock train cats

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

test: lint
	$(BIN)/pytest

test-slow: $(STAMP)
	$(BIN)/pytest -m slow

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
