# Everything a newcomer needs. Set-up happens by itself, once; `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help run test lint types fast bench docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# pip, not another installer: constraints.txt pins torch to its CPU build's version, and pip finds that build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

run: $(READY) ## set up, then train the bundled example: 20 clients in 4 hidden groups
	$(BIN)/bcfl run

test: lint types $(READY) ## set up, then run all checks: ruff, mypy, pytest
	$(BIN)/python -m pytest -n 2

fast: $(READY) ## the tests that take less than a few seconds each
	$(BIN)/python -m pytest -n 2 -m "not slow"

lint: $(READY) ## ruff: style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY) ## mypy, strict on src
	$(BIN)/mypy

bench: $(READY) ## the speed and memory figures, as ratios measured in one run
	$(BIN)/python benchmarks/core.py

docs: $(READY) ## the documentation site, in site/
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html"

clean: ## remove the environment and caches
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
