# The stack in containers, with docker or podman, whichever is there. COMPOSE and BUILD override the commands:
#   make compose-test COMPOSE="podman-compose" BUILD="podman build --format docker"
COMPOSE ?=
BUILD ?=
export COMPOSE BUILD

.PHONY: compose-build compose-test

compose-build: setup
	@$(BIN)/python deploy/compose_test.py --only-build --tag dev

compose-test: setup
	@$(BIN)/python deploy/compose_test.py
