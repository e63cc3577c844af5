# Two commands are all a newcomer needs: `make up` and `make test`. Each sets up what it needs.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
# What running needs, then compiled; and beyond it what style, types and tests need.
STAMP := $(VENV)/.setup-done
COMPILED := $(VENV)/.setup-compiled
DEV_STAMP := $(VENV)/.setup-dev-done
DOCS_STAMP := $(VENV)/.setup-docs-done
JS_STAMP := sdk/js/node_modules/.package-lock.json
LOG := $(VENV)/setup.log
# What `make test` prints of the checks that run beside pytest.
CHECKS := $(VENV)/checks.log
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
PROJECTS := $(sort $(wildcard */pyproject.toml services/*/pyproject.toml sdk/python/pyproject.toml))
UP_ARGS ?=
PYTEST_ARGS ?=
# Tests wait for servers more than they compute, so three files for each of two cores leave little of them idle.
TEST_PROCESSES ?= 6
# Some container images forbid Python to keep compiled modules. Each of the processes that a stack or a test
# starts would then compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-dev setup-js sdk-js up demo test coverage soak lint lint-style lint-types lint-imports lint-docs docs wheels format

help:
	@echo "make up      set up, start the whole stack, print the address of the player page"
	@echo "             (options: make up UP_ARGS='--workers 2 --port 9000')"
	@echo "make demo    start a stack, play a scripted session, leave its video as demo.mp4"
	@echo "make test    set up, check style, types and imports, run every test"
	@echo "make coverage  every test, with all branches and lines that they execute, module by module"
	@echo "make soak    the long tests that make test leaves out"
	@echo "make setup   only create $(VENV) with what running needs (make setup-dev: and what testing needs)"
	@echo "make compose-up    the stack in containers, with passwords and an API key of its own (make compose-down)"
	@echo "make compose-test  build the images, stream a session through the stack in containers, take it down"
	@echo "make docs    build the documentation site into site/; a broken link fails"
	@echo "make sdk-js  compile the JavaScript client (sdk/js): src/ to dist/"
	@echo "make wheels  build every distribution into dist/"
	@echo "make format  let ruff fix and format the code"

setup: $(COMPILED)

# Without npm or its registry, the tests that compile sdk/js are skipped.
setup-dev: $(DEV_STAMP)
	@if command -v npm >/dev/null; then $(MAKE) setup-js 2>>$(LOG) || true; fi

PIP = pip() { $(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt "$$@" >>$(LOG) 2>&1 \
	|| { grep -E '^ *(ERROR|error)' $(LOG) || tail -n 20 $(LOG); echo "setup: pip failed; all of it in $(LOG)"; exit 1; }; }

# Depends on what decides the environment's content, so that an unchanged tree costs nothing.
$(STAMP): $(PROJECTS) constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "setup: TurboServe needs Python 3.11 or newer; found: $$(python3 --version 2>&1 || true)."; \
		echo "setup: install one, or say which to use: make setup PYTHON=/path/to/python3"; exit 1; fi; \
	if [ ! -x $(BIN)/python ]; then \
		echo "setup: creating $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
			echo "setup: no virtual environment could be made (on Debian: apt-get install python3-venv)"; exit 1; }; fi; \
	: >$(LOG); $(PIP); \
	echo "setup: installing build tools (details in $(LOG))"; \
	pip hatchling editables; \
	echo "setup: installing TurboServe's distributions, editable, and what they need (the first time takes a minute or two)"; \
	pip --no-build-isolation --no-compile $(foreach p,$(PROJECTS),-e ./$(dir $(p))); \
	echo "$$SECONDS s" >$@

# pip compiles modules on one core, compileall on all. Some packages ship files that are not Python 3: no error.
$(COMPILED): $(STAMP)
	@set -- $(VENV)/lib/*/site-packages/*; $(BIN)/python -m compileall -q -j 0 "$$@" >>$(LOG) 2>&1 || true; \
	size="$$(($$(cut -d ' ' -f 1 $(STAMP)) + SECONDS)) s, $$(du -smc "$$@" 2>>$(LOG) | tail -n 1 | cut -f 1 || true) MB"; \
	touch -r $(STAMP) $@; echo "$$size" >$(STAMP); touch -r $@ $(STAMP); \
	echo "setup: $(VENV) is ready: $$size"  # `turboserve up` prints the size.

# Tests import a small part of these packages, and Python keeps what it compiles when it imports. What running
# needs is compiled meanwhile: pip uses one core.
$(DEV_STAMP): $(STAMP) requirements-dev.txt requirements-docs.txt requirements-s3.txt
	@echo "setup: installing what style, types and tests need"; $(PIP); make $(COMPILED) & compiling=$$!; \
	pip --no-compile -r requirements-dev.txt; pip --no-compile --no-deps -r requirements-s3.txt; \
	wait $$compiling; touch $@; echo "setup: and what testing needs: $$SECONDS s"

# The compiler of the JavaScript client.
setup-js: $(JS_STAMP)
	@:

$(JS_STAMP): sdk/js/package-lock.json
	@echo "setup: installing the compiler of sdk/js"
	@npm ci --prefix sdk/js --ignore-scripts --no-audit --no-fund --loglevel error --fetch-retries 0 \
		|| { echo "setup: npm failed; sdk/js cannot be compiled"; exit 1; }
	@touch $@

sdk-js: setup-js
	@rm -rf sdk/js/dist; npm run --prefix sdk/js --silent build; ls sdk/js/dist

$(DOCS_STAMP): $(STAMP) requirements-docs.txt
	@echo "setup: installing what the documentation site needs"; $(PIP); pip -r requirements-docs.txt; touch $@

# Material prints a notice of its own unless it is asked not to. With --quiet, --strict would count no warning.
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs: $(DOCS_STAMP)
	@$(MKDOCS) --site-dir site; echo "docs: site/index.html"

up: setup
	@exec $(BIN)/turboserve up $(UP_ARGS)

demo: setup
	@$(BIN)/python tools/demo.py

# Types take half a minute of one core; the rest is done beside them.
lint: setup-dev
	@$(MAKE) -j2 --output-sync=target lint-types lint-imports lint-style lint-docs

lint-style:
	@echo "test: ruff check"; $(BIN)/ruff check .
	@echo "test: ruff format --check"; $(BIN)/ruff format --check .

# In CI nothing reads mypy's cache afterwards, and to write it takes a tenth of the CPU time.
lint-types:
	@echo "test: mypy --strict"; $(BIN)/mypy $(if $(CI),--cache-dir=/dev/null) $(sort $(wildcard */turboserve services/*/turboserve sdk/*/turboserve)) tests tools

lint-imports:
	@echo "test: lint-imports"; $(BIN)/lint-imports

# Into the environment's folder: a check leaves nothing in the tree.
lint-docs:
	@echo "test: mkdocs build --strict"; $(MKDOCS) --site-dir $(VENV)/site

# One process collects the tests, and tests often wait. So imports, types and documents are checked beside them. The
# report on these comes after that of the tests.
test: setup-dev
	@$(MAKE) lint-style
	@echo "test: pytest, $(TEST_PROCESSES) files at a time; beside it lint-imports, mypy and mkdocs"; \
		rm -f .coverage .coverage.*; status=0; \
		$(MAKE) --keep-going lint-imports lint-types lint-docs >$(CHECKS) 2>&1 & checks=$$!; \
		$(BIN)/python -m pytest -p tests.helpers.sampled_coverage -p tests.helpers.cpu_times \
		--processes $(TEST_PROCESSES) $(PYTEST_ARGS) || status=$$?; wait $$checks || status=$$(($$status ? $$status : 1)); cat $(CHECKS); \
		$(BIN)/python -m coverage combine --quiet || exit 1; \
		echo "test: these tests execute at least $$($(BIN)/python -m coverage report --format=total) % of the" \
		"lines and branches"; exit $$status

# More than twice as long as `make test`: each branch is recorded, also of processes that tests start.
coverage: setup-dev
	@rm -f .coverage .coverage.*; status=0; \
		$(BIN)/python -m coverage run -m pytest --processes $(TEST_PROCESSES) $(PYTEST_ARGS) || status=$$?; \
		$(BIN)/python -m coverage combine --quiet; $(BIN)/python -m coverage report --sort=cover; \
		$(BIN)/python tools/never_executed.py || status=1; exit $$status

soak: setup-dev
	@echo "soak: pytest, one file at a time"; $(BIN)/python -m pytest -m soak --timeout 1800 $(PYTEST_ARGS)
	@echo "soak: more and other examples of each property"; \
		$(BIN)/python -m pytest -m "hypothesis and not soak" --hypothesis-profile explore --timeout 1800 $(PYTEST_ARGS)

wheels: setup
	@rm -rf dist; $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		-w dist $(foreach p,$(PROJECTS),./$(dir $(p))); ls dist

format: setup-dev
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

-include deploy/compose.mk
