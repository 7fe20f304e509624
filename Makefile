# Two commands: `make run` starts the whole fabric, `make test` proves it. Both set up what they need.
# The newest of these Pythons that works here, or PYTHON=/path/to/python; 3.11 or newer.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
endif
# What installs packages: uv, or pip where uv cannot be had; INSTALLER=pip chooses. TORCH=cpu, default (the configured
# index's build) or the URL of an index chooses the build of torch (docs/how-to/install.md).
INSTALLER ?= auto
TORCH ?= auto
VENV := .venv
BIN := $(VENV)/bin
STAMP := .make
SETUP = $(if $(PYTHON),$(PYTHON),$(error kvloom needs Python 3.11 or newer: set PYTHON=/path/to/python)) -m setup \
	--installer $(INSTALLER) --torch $(TORCH) $(if $(filter command environment,$(firstword $(origin PYTHON))),--same-python)
ARGS ?=
# Processes that run tests: one more than two cores, since tests also wait.
TEST_WORKERS ?= 3
# Threads of several engines that share the cores must not wait for one another by spinning.
test test-long test-pythons test-cpus unit lab-test: export OMP_WAIT_POLICY = passive
# Many processes start: each would compile what the last one did.
run test test-long test-pythons test-cpus unit lab-test: export PYTHONDONTWRITEBYTECODE =

.PHONY: help run observe test lab-test test-long test-pythons test-cpus durations setup setup-dev proto check lint types imports protos-check collect unit wheels fuzz test-schemathesis test-triton test-deploy test-clients clean

help: ## Show this.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' | expand -t 20

run: setup ## Set up and start the fabric: real model, chat page. ARGS="--shards 1" is passed on.
	@exec $(BIN)/kvloom up $(ARGS)

observe: ## Start Prometheus with kvloom's alerts beside a running fabric (docs/operate/alerts.md).
	@exec deploy/observe/run

test: setup-dev ## Checks, and all tests but the long ones, three at a time. ARGS="-k name" is passed to pytest.
	$(MAKE) --no-print-directory -j 2 --output-sync=target lint types imports protos-check collect
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --junitxml=build/tests.xml $(ARGS)

lab-test: setup-dev ## The laboratory's part of `make test`: simulation tests with planted bugs, chaos and benches.
	$(BIN)/python -m pytest -n $(TEST_WORKERS) tests/lab $(ARGS)

test-long: setup-dev test-pythons test-deploy ## Searches, soaks and further positions of the same proofs, which `make test` leaves out.
	$(BIN)/python -m pytest -n $(TEST_WORKERS) -m "long or hypothesis" --hypothesis-profile=long $(ARGS)

test-pythons: setup-dev ## The quick tests with the oldest and the newest Python of this machine.
	$(PYTHON) -m setup.pythons -n $(TEST_WORKERS)

ENGINE_TESTS = tests/conformance tests/unit/shard_server $(wildcard tests/property/test_torch_*.py \
	tests/property/test_shard_server_*.py tests/integration/test_torch_*.py tests/integration/test_failover_*.py \
	tests/integration/test_shadow*torch.py)

test-cpus: setup-dev ## The engines' tests as on lesser x86 CPUs: AVX2 alone, AVX-512 without BF16, one core.
	NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES= ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 \
	  $(BIN)/python -m pytest -n $(TEST_WORKERS) $(ENGINE_TESTS) $(ARGS)
	NUMBA_CPU_NAME=x86-64-v4 NUMBA_CPU_FEATURES= ONEDNN_MAX_CPU_ISA=AVX512_CORE ATEN_CPU_CAPABILITY=avx512 \
	  $(BIN)/python -m pytest -n $(TEST_WORKERS) $(ENGINE_TESTS) $(ARGS)
	taskset -c 0 $(BIN)/python -m pytest -n 0 $(ENGINE_TESTS) $(ARGS)

durations: ## Record how long the tests of the last `make test` took, against which budgets are checked.
	$(BIN)/python -m tests.durations record build/tests.xml

unit: setup-dev ## The quick tests: of one part each, without those that need torch.
	TEST_WITHOUT_TORCH=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) tests/unit tests/property $(ARGS)

SCHEMATHESIS_CHECKS = not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,response_headers_conformance

test-schemathesis: setup-dev ## Requests made up from /openapi.json: no 500, no answer that it does not describe. EXAMPLES=50 a route.
	test -x .venv-schemathesis/bin/schemathesis || (python3 -m venv .venv-schemathesis && .venv-schemathesis/bin/pip install -q schemathesis==4.32.5)
	$(BIN)/python -m tests.schemathesis.serve_edge -- .venv-schemathesis/bin/schemathesis run --seed $(or $(SEED),1) \
	  --max-examples $(or $(EXAMPLES),50) --phases examples,coverage,fuzzing --checks $(SCHEMATHESIS_CHECKS)

test-deploy: ## The chart by Helm: rendered, validated, installed in a fake cluster; and the images' build commands in a clean folder. ARGS="chart" for one.
	test -x .venv-deploy/bin/cyclonedx-py || ($(PYTHON) -m venv .venv-deploy && .venv-deploy/bin/pip install -q \
	  helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 cyclonedx-bom==7.5.0 PyYAML==6.0.3)
	.venv-deploy/bin/python -m tests.deploy.check $(ARGS)

test-triton: setup-dev ## The Triton kernels of GPUs, by its interpreter and compiled for GPUs that are only named; installs Triton (1 GB).
	test -d .venv-triton/triton || $(BIN)/uv pip install -q --no-deps --target .venv-triton triton==3.9.0
	PYTHONPATH=.venv-triton TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 0 tests/integration/test_torch_segment_kernels.py
	PYTHONPATH=.venv-triton $(BIN)/python -m pytest -n 0 -m "long or not long" tests/integration/test_torch_kernel_variants.py

fuzz: setup-dev ## Fuzz for SECONDS=60, all targets or TARGET="name name"; failures are kept in tests/fuzz/corpus.
	$(BIN)/python -m tests.fuzz.run --seconds $(or $(SECONDS),60) $(TARGET)

CLIENTS_PYTHON = $(patsubst tests/clients/python/%.txt,$(STAMP)/clients-%,$(wildcard tests/clients/python/*.txt))

test-clients: setup-dev $(CLIENTS_PYTHON) $(STAMP)/clients-node $(STAMP)/clients-agents ## The clients of others (openai, LangChain and more), which it installs. ARGS="--only openai" for some, AGENT_ARGS for agents.
	$(BIN)/python -m tests.clients.run $(ARGS)
	$(BIN)/python -m tests.clients.run_agents $(AGENT_ARGS)
	KVLOOM_TEST_CLIENTS=1 $(BIN)/python -m pytest -q tests/integration/test_client_recipes.py

$(STAMP)/clients-%: tests/clients/python/%.txt
	@echo "setup: clients of $<"
	@rm -rf .venv-clients/$* && $(PYTHON) -m venv .venv-clients/$*
	@.venv-clients/$*/bin/python -m pip install --quiet --no-input --upgrade pip
	@.venv-clients/$*/bin/python -m pip install --quiet --no-input -r $<
	@mkdir -p $(STAMP) && touch $@

$(STAMP)/clients-agents: tests/clients/agents/package.json
	@echo "setup: agents of $< (1.5 GB)"
	@cd tests/clients/agents && npm install --silent --no-package-lock --no-audit --no-fund
	@mkdir -p $(STAMP) && touch $@

$(STAMP)/clients-node: tests/clients/node/package.json
	@command -v npm >/dev/null || { echo "make test-clients needs Node 20 or newer, with npm" >&2; exit 1; }
	@echo "setup: clients of $<"
	@# Without a lock file, which would name the registry.
	@cd tests/clients/node && npm install --silent --no-package-lock --no-audit --no-fund
	@mkdir -p $(STAMP) && touch $@

wheels: setup-dev ## Both wheels, the SDK's and the fabric's, in dist/ (docs/how-to/install.md).
	$(BIN)/hatchling build -t wheel -d $(CURDIR)/dist
	cd fabric && ../$(BIN)/hatchling build -t wheel -d $(CURDIR)/dist

check: lint types imports protos-check ## All that needs no running code.

setup: ## What `make run` needs.
	@$(SETUP) services

setup-dev: ## What `make test` needs.
	@$(SETUP) dev

proto: setup ## Generate the gRPC stubs.

# Beside the checks, most of which use one core. What is imported is compiled here, once: each of the processes that run
# the tests would do so by itself, at the same time.
collect: setup-dev
	@mkdir -p build
	@$(BIN)/python -m pytest --collect-only -qq > build/collected.txt || { tail -n 50 build/collected.txt; exit 1; }

lint: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tests.words

types: setup-dev
	$(BIN)/pyrefly check --summary=none

imports: setup-dev
	$(BIN)/lint-imports

protos-check: setup-dev
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf lint
	.ci/protos-breaking $(BIN)/buf

clean: ## Remove what setup and tests made.
	rm -rf $(VENV) .venv-3.* .venv-clients .venv-schemathesis .venv-deploy tests/clients/node/node_modules $(STAMP) build dist fabric/dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f kvloom/v1/*_pb2*.py kvloom/v1/*_pb2*.pyi
