# Every target that people rely on. `make help` lists them.
SHELL := /bin/bash
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.dsec-installed
# The first interpreter that runs and is new enough (a version manager's shim may be there and not run).
PYTHON3 ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)

# Each failure is told in full when it happens, and by name at the end.
TOLD := -q --instafail
# Tests wait more than they work; each file's tests stay in one process, the longest first.
PROCESSES ?= 2
AT_ONCE := $(TOLD) --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help

.PHONY: help
help:  ## List the targets
	@grep -hE '^[a-z0-9_-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# --- Set-up ---

.PHONY: system
system:  ## Install the system packages that are missing (says which; Debian and Ubuntu)
	@scripts/system-packages

$(STAMP): pyproject.toml hatch_build.py $(wildcard services/sandboxd/src/dsec_sandboxd/native/*.[ch]) $(wildcard services/sandboxd/src/dsec_sandboxd/native/Makefile)
	@scripts/system-packages
	@test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@# The exact solver that ours is compared with; it asks for an older protobuf, which it does not use.
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps 'ortools>=9.12,<10'
	@touch $@

.PHONY: install
install: $(STAMP)  ## Build the environment in .venv, C programs included

.PHONY: kafka
kafka: $(STAMP)  ## Resolve Apache Kafka's jars through Maven (tests and durable logs)
	@$(PYTHON) -m dsec_common.embedded.kafka fetch

.PHONY: clean
clean:  ## Remove what was built (the environment stays)
	rm -rf build dist services/sandboxd/src/dsec_sandboxd/native/bin benchmarks/native/bin
	rm -f $(STAMP)
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# --- Using it ---

.PHONY: demo
demo: $(STAMP)  ## The main job end to end: agents repair a package in sandboxes, trained over Chronus
	@$(PYTHON) -m examples.repair

.PHONY: up
up: $(STAMP)  ## Start everything on this machine (as root)
	@$(VENV)/bin/dsec up

# --- Checks ---

.PHONY: check
check: lint types arch  ## Lint, types and architecture

.PHONY: fmt
fmt: $(STAMP)  ## Format the code
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

.PHONY: lint
lint: $(STAMP)  ## ruff, and the C programs with warnings as errors
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

.PHONY: types
types: $(STAMP)  ## mypy, strict
	$(VENV)/bin/mypy

.PHONY: arch
arch: $(STAMP)  ## The import contracts
	$(VENV)/bin/lint-imports

.PHONY: unit
unit: $(STAMP)  ## Pure cores, wire types, parsers
	$(PYTHON) -m pytest tests/unit -q

.PHONY: component
component: $(STAMP)  ## Each service against a real NATS
	$(PYTHON) -m pytest tests/component -q

.PHONY: contract
contract: $(STAMP)  ## Bus and log suites against real NATS, the embedded broker and Apache Kafka
	$(PYTHON) -m pytest tests/contract -q

.PHONY: kernel
kernel: $(STAMP)  ## Sandboxes on the real kernel (as root)
	$(PYTHON) -m pytest tests/kernel -q

.PHONY: e2e
e2e: $(STAMP)  ## The whole platform, through the SDK and the CLI (as root)
	$(PYTHON) -m pytest tests/e2e -q

.PHONY: machines
machines: $(STAMP)  ## The services as containers, and cgroup v2 alone in an emulated machine
	$(PYTHON) -m pytest tests/machines -q

.PHONY: security
security: $(STAMP)  ## What an attacker tries (as root)
	DSEC_TESTS_MAY_NOT_SKIP=1 $(PYTHON) -m pytest tests/security -q

.PHONY: inspect
inspect: $(STAMP)  ## Inspect AI's own conformance checks, and an evaluation, on DSec sandboxes (as root)
	DSEC_TESTS_MAY_NOT_SKIP=1 $(PYTHON) -m pytest -q \
		tests/e2e/test_inspect_checks.py tests/e2e/test_inspect_eval.py tests/e2e/test_inspect_bridge.py

.PHONY: test
test: check  ## All that CI checks (installs what only tests need)
	@scripts/system-packages --for-tests
	@$(PYTHON) -m dsec_common.embedded.kafka fetch
	@$(PYTHON) -m pytest $(AT_ONCE) -m "not alone" || status=1; \
	$(PYTHON) -m pytest $(TOLD) -m alone || status=1; exit $$status

.PHONY: bench
bench: $(STAMP)  ## All benchmarks, each beside the kernel's limit
	$(PYTHON) -m benchmarks all

.PHONY: soak
soak: $(STAMP)  ## Random use under kill -9 of every part; SOAK_SECONDS=600, SOAK_SEED (as root)
	$(PYTHON) -m soak $(if $(SOAK_SEED),--seed $(SOAK_SEED))

.PHONY: chaos-control
chaos-control: $(STAMP)  ## Leases and placements under kill -9 of brokers and schedulers; CHAOS_SECONDS=300, CHAOS_SEED
	$(PYTHON) -m soak.control $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))

.PHONY: chaos-rollout
chaos-rollout: $(STAMP)  ## Steps of rollouts under kill -9 of trainer, Chronus, nodes and NATS; CHAOS_SECONDS=300, CHAOS_SEED (as root)
	$(PYTHON) -m soak.rollout $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))
