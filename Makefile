# `make demo` and `make test` need Python 3.11, g++ and make; all else is installed into .venv.
# The stamp .venv/.built lets a second call reuse it all, until a file that the build reads changes.

PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := training,examples,test,dev
CPP := $(wildcard runtime_ext/*.cpp runtime_ext/*.h)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build demo test test-long lint format wheel bench clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- the environment ---------------------------------------------------------------------------------

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "torch2ort's build needs Python 3.11 (onnxruntime-training-cpu 1.19.2 has no \
	wheel for a later one). Install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Packages from the index that are already there are kept, and only C++ files that changed are compiled.
$(VENV)/.built: pyproject.toml constraints.txt CMakeLists.txt $(CPP) | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

build: $(VENV)/.built  ## Make .venv and compile the extension

# --- what people run ---------------------------------------------------------------------------------

demo: build  ## Train the example transformer eager and on ONNX Runtime, side by side
	$(BIN)/python examples/char_transformer.py

test: build  ## Run the tests
	$(BIN)/python -m pytest --quiet

test-long: build  ## Run the tests that take minutes
	TORCH2ORT_LONG=1 $(BIN)/python -m pytest --quiet -m long

lint: build  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(CPP),$(BIN)/clang-format --dry-run --Werror $(CPP))

format: build  ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP),$(BIN)/clang-format -i $(CPP))

wheel: build  ## Build a wheel into dist/
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

bench: build  ## Print the benchmarks' ratios to eager PyTorch
	$(BIN)/python benchmarks/pythonop_overhead.py
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/call_policy.py
	$(BIN)/python benchmarks/io_schema.py

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build dist
