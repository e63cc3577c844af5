# The stack in containers, with docker or podman, whichever is there. COMPOSE and BUILD override the commands:
#   make compose-test COMPOSE="podman-compose" BUILD="podman build --format docker"
COMPOSE ?=
BUILD ?=
export COMPOSE BUILD

.PHONY: compose-build compose-env compose-up compose-down compose-test

compose-build: setup
	@$(BIN)/python deploy/compose_test.py --only-build --tag dev

# Passwords and an API key, made once: .env is never overwritten.
compose-env:
	@$(if $(PYTHON),$(PYTHON),python3) deploy/compose_env.py

compose-up: setup compose-env
	@$(BIN)/python deploy/compose_up.py

compose-down: setup
	@$(BIN)/python deploy/compose_up.py down

compose-test: setup
	@$(BIN)/python deploy/compose_test.py
