# Every target does its own set-up; each is safe to repeat. `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PROTO := services/common/pb/glm53/worker/v1/worker.proto
CXX_FILES = $(shell git ls-files 'kernels/*.h' 'kernels/*.c' 'kernels/*.cpp' 'kernels/*.cu' 'kernels/*.cuh')
PYTEST_ARGS ?=
# Side by side: a good part of the tests' time is waiting. More would need more processors than a small machine has. 0: one after the other.
TEST_PROCESSES ?= 2
ARGS ?=

.PHONY: help serve test test-deploy test-gpu bench bench-kernel sanitize lint fmt proto kernels fresh-check clean setup setup-dev setup-otel

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

serve: setup ## Set everything up, then serve on http://127.0.0.1:30000/v1 (ARGS="--port 30001 --mode exact ...")
	@$(VENV)/bin/glm53 serve $(ARGS)

# The tests' matrices are small: further threads of OpenMP and BLAS compute nothing sooner, and spin on processors that other tests need.
test: export OMP_NUM_THREADS = 1
test: export OPENBLAS_NUM_THREADS = 1
test: setup-dev lint ## Set everything up, then lint, type-check and run every test that needs no GPU
	$(PY) -m pytest -n $(TEST_PROCESSES) --dist loadfile -m "not containers" $(PYTEST_ARGS)

test-deploy: setup-dev .state/debian-deploy ## Build the images and run the compose stack for real (root; podman, runc and mmdebstrap are installed)
	$(PY) -m pytest -m containers tests/deploy $(PYTEST_ARGS)

test-gpu: setup-dev ## Run the tests that need an NVIDIA GPU with exllamav3
	scripts/install.sh --gpu # the other tests' torch may have taken the place of the one that exllamav3 needs
	$(PY) -m pytest -m gpu $(PYTEST_ARGS)

bench: setup-dev ## Measure the whole stack on this machine; writes docs/results/stack_cpu.json
	$(PY) -m bench.stack_cpu $(ARGS)

bench-kernel: setup-dev ## Measure the expert kernel against exllamav3's CPU kernels (compiled for it); writes docs/results/cpu_kernel_*.json
	$(PY) -m bench.cpu_kernel $(ARGS)

sanitize: setup-dev ## Run the expert kernel's stress program under address, undefined-behaviour and thread sanitizers
	nice -n 19 tools/sanitize.sh

lint: setup-dev ## Linters, type checks, import rules, C++ format
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)

fmt: setup-dev ## Format Python and C++
	$(VENV)/bin/ruff check --fix -q . ; $(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

fresh-check: ## Prove `make serve` and `make test` in an empty Debian 12 (root, mmdebstrap)
	tools/fresh_check.sh

clean: ## Remove everything that was built or installed here
	rm -rf $(VENV) build .state tests/clients/node/node_modules kernels/python/lib services/common/pb *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# What somebody has added stays of the pinned versions.
setup: .state/serve proto kernels $(wildcard .state/otel)
setup-otel: setup .state/otel ## Set everything up, with the pinned packages that GLM53_OTLP_ENDPOINT needs (OpenTelemetry traces)
setup-dev: .state/dev .state/node-clients .state/checkov proto kernels

setup-dev: KERNEL_ARGS = --test

proto: .state/proto ## Generate the gRPC stubs
kernels: .state/serve ## Build the C++ kernels, and the GPU kernels where there are nvcc and a GPU (always, with test programs, for the tests)
	@$(PY) tools/build_kernels.py $(KERNEL_ARGS)

# Stamps: a step runs again only when what it depends on has changed.
.state/debian: tools/debian_packages.sh
	@tools/debian_packages.sh
	@mkdir -p .state && touch $@

.state/venv: .state/debian
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@touch $@

.state/serve: .state/venv pyproject.toml requirements.lock
	@tools/pip_install.sh worker,build
	@touch $@

.state/otel: .state/serve pyproject.toml requirements.lock
	@tools/pip_install.sh worker,build,otel
	@touch $@

.state/debian-test: .state/debian # apt takes one at a time
	@tools/debian_packages.sh test
	@mkdir -p .state && touch $@

.state/debian-deploy: .state/debian-test
	@tools/debian_packages.sh deploy
	@mkdir -p .state && touch $@

.state/dev: .state/debian-test .state/serve pyproject.toml requirements.lock
	@tools/pip_install.sh worker,build,reference,test,deploy,lint
	@touch $@

.state/node-clients: .state/dev tests/clients/node/package.json tests/clients/node/package-lock.json tests/clients/node/.npmrc
	@$(PY) -m tools.node_clients
	@touch $@

# checkov pins versions that ours contradict: it gets an environment of its own.
.state/checkov: .state/venv tools/checkov.lock
	@echo "Installing checkov into .state/checkov-venv"
	@$(PYTHON) -m venv --clear .state/checkov-venv
	@.state/checkov-venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tools/checkov.lock
	@touch $@

.state/proto: .state/serve proto/glm53/worker/v1/worker.proto
	@mkdir -p services/common/pb
	@$(PY) -m grpc_tools.protoc --proto_path=services/common/pb=proto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTO)
	@touch $@
