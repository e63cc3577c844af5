# Two commands are all a newcomer needs: `make up` and `make test`. Each sets up what it needs.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
LOG := $(VENV)/setup.log
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
PROJECTS := $(sort $(wildcard */pyproject.toml services/*/pyproject.toml))
UP_ARGS ?=
PYTEST_ARGS ?=
# Tests wait for servers more than they compute: on 2 cores 3 files at a time keep both busy.
TEST_PROCESSES ?= 3

.PHONY: help setup up test soak lint format

help:
	@echo "make up      set up, start the whole stack, print the address of the player page"
	@echo "             (options: make up UP_ARGS='--workers 2 --port 9000')"
	@echo "make test    set up, check style, types and imports, run every test"
	@echo "make soak    the long tests that make test leaves out"
	@echo "make setup   only create $(VENV) and install everything into it"
	@echo "make compose-up    the stack in containers, with passwords and an API key of its own (make compose-down)"
	@echo "make compose-test  build the images, stream a session through the stack in containers, take it down"
	@echo "make format  let ruff fix and format the code"

setup: $(STAMP)
	@echo "setup: $(VENV) is ready"

# Depends on what decides the environment's content, so that an unchanged tree costs nothing.
$(STAMP): $(PROJECTS) constraints.txt requirements-dev.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "setup: TurboServe needs Python 3.11 or newer; found: $$(python3 --version 2>&1 || true)."; \
		echo "setup: install one, or say which to use: make setup PYTHON=/path/to/python3"; exit 1; fi
	@if [ ! -x $(BIN)/python ]; then \
		echo "setup: creating $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
			echo "setup: no virtual environment could be made (on Debian: apt-get install python3-venv)"; exit 1; }; fi
	@: >$(LOG)
	@echo "setup: installing packages into $(VENV) (the first time takes minutes; details in $(LOG))"
	@pip() { $(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt "$$@" >>$(LOG) 2>&1 \
			|| { grep -E '^ *(ERROR|error)' $(LOG) || tail -n 20 $(LOG); echo "setup: pip failed; all of it in $(LOG)"; exit 1; }; }; \
		pip -r requirements-dev.txt; \
		echo "setup: installing TurboServe's distributions, editable"; \
		pip --no-build-isolation $(foreach p,$(PROJECTS),-e ./$(dir $(p)))
	@touch $@

up: setup
	@exec $(BIN)/turboserve up $(UP_ARGS)

lint: setup
	@echo "test: ruff check"; $(BIN)/ruff check .
	@echo "test: ruff format --check"; $(BIN)/ruff format --check .
	@echo "test: mypy --strict"; $(BIN)/mypy $(sort $(wildcard */turboserve services/*/turboserve))
	@echo "test: lint-imports"; $(BIN)/lint-imports

test: lint
	@echo "test: pytest, $(TEST_PROCESSES) files at a time"; \
		$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

soak: setup
	@echo "soak: pytest, one file at a time"; $(BIN)/python -m pytest -m soak --timeout 1800 $(PYTEST_ARGS)

format: setup
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

-include deploy/compose.mk
