# Everything a newcomer needs. Set-up happens by itself, once; `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip, not another installer: constraints.txt pins torch to its CPU build's version, and pip finds that build.
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# A registry that is away for a minute or two is waited for.
export PIP_RETRIES := 8
export PIP_DISABLE_PIP_VERSION_CHECK := 1
USABLE := $(VENV)/.usable
CHECKED := $(VENV)/.checked

.DEFAULT_GOAL := help
.PHONY: help run ray test lint types fast fuzz bench peers docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# What a user needs is installed first and alone, so that the first run comes soon.
$(USABLE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[report]'
	@touch $@

$(CHECKED): $(USABLE)
	$(INSTALL) --editable '.[report,tracking,flower,natural,docs,dev]'
	# An independent Fisher to check ours against. Without its dependencies: it names torchvision, and needs it nowhere.
	$(INSTALL) --no-deps backpack-for-pytorch einops unfoldNd
	@touch $@

run: $(USABLE) ## set up, then train the bundled example: 20 clients in 4 hidden groups
	$(BIN)/bcfl run

test: lint types $(CHECKED) ## set up, then run all checks: ruff, mypy, pytest
	$(BIN)/python -m pytest -n 2 --dist worksteal

fast: $(CHECKED) ## the tests that take less than a few seconds each
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

ray: $(CHECKED) ## install Ray (360 MB) and run its tests: several nodes in one machine, one of them killed
	$(INSTALL) --editable '.[ray]'
	$(BIN)/python -m pytest tests/engines/test_ray.py

fuzz: export BCFL_FUZZ := $(or $(BCFL_FUZZ),10000)
fuzz: $(CHECKED) ## mutated settings, data files, run folders and messages: BCFL_FUZZ of each kind (10000)
	$(BIN)/python -m pytest -m fuzz -s

lint: $(CHECKED) ## ruff: style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(CHECKED) ## mypy, strict on all but the tests
	$(BIN)/mypy

bench: $(CHECKED) ## the speed and memory figures, as ratios measured in one run; ONLY=core, rounds, footprint, peers or million
	$(BIN)/python benchmarks/suite.py $(if $(ONLY),--only $(ONLY))

# Frameworks that others train federations with, in an environment of their own: they want other versions than we do.
peers: .peers/.ready ## install what `make bench ONLY=peers` compares with: JAX, fedjax and Flower (1 GB)

.peers/.ready: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv .peers
	.peers/bin/python -m pip install --quiet --constraint constraints.txt --requirement $<
	@touch $@

docs: $(CHECKED) ## the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html"

clean: ## remove the environment and caches
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
