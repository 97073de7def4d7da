# `make demo` and `make test` need a Python from 3.10 to 3.13 with venv and its headers, g++ and make; everything else
# is installed into .venv. Stamp files let a second call reuse the environment until an input of the build changes.

# A version manager may put names on the path of Pythons that are not installed.
SUITS := import ensurepip, os, sys, sysconfig, venv; \
	sys.exit(not ((3, 10) <= sys.version_info < (3, 14) and os.path.exists(sysconfig.get_path("include") + "/Python.h")))
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3.10 python3; do \
	$$python -c '$(SUITS)' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --constraint constraints.txt --editable
# Tests of one file stay in one process, so that fixtures of a module are set up once.
WORKERS ?= 2
PYTEST := -m pytest --quiet --numprocesses $(WORKERS) --dist loadfile
# Tests that `make test-long` runs in parts of a file, as one process would take hours.
IN_PARTS := tests/leaks tests/ops/test_opinfo.py tests/random_programs
CPP := $(wildcard runtime_ext/*.cpp runtime_ext/*.h runtime_ext/*/*.cpp runtime_ext/*/*.h)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build tools demo test test-long test-matrix test-newest sanitize check-gpu lint format wheel docs bench clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- the environment ---------------------------------------------------------------------------------

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "torch2ort's build needs a Python from 3.10 to 3.13 with venv and its headers, and \
	none is on the path. Install one, or name it: make demo PYTHON=/path/to/python3.13" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Packages from the index that are already there are kept.
BUILT_FROM := pyproject.toml constraints.txt CMakeLists.txt $(CPP)

$(VENV)/.built: $(BUILT_FROM) | $(BIN)/python
	$(INSTALL) '.[cpu,examples]'
	@touch $@

$(VENV)/.tools: $(BUILT_FROM) | $(BIN)/python
	$(INSTALL) '.[cpu,dev]'
	@touch $(VENV)/.built $@

build: $(VENV)/.built  ## Make .venv and compile the extension

tools: $(VENV)/.tools  ## Make .venv with the dependencies of tests and development

# --- commands ----------------------------------------------------------------------------------------

demo: build  ## Train the example transformer eager and on ONNX Runtime, side by side
	$(BIN)/python examples/char_transformer.py

test: tools  ## Run the tests
	$(BIN)/python $(PYTEST)

test-long: tools  ## Run the tests that take minutes or hours, and those that need DeepSpeed
	$(INSTALL) '.[cpu,dev,deepspeed]'
	TORCH2ORT_LONG=1 $(BIN)/python $(PYTEST) -m long $(addprefix --ignore=,$(IN_PARTS))
	$(BIN)/python $(PYTEST) tests/loops/test_deepspeed.py
	TORCH2ORT_LONG=1 $(BIN)/python $(PYTEST) --dist load -m long $(IN_PARTS)

# Python's objects come from the C library's heap, where AddressSanitizer sees them. Leaks at exit are not reported, as
# CPython, torch and onnxruntime keep much memory on purpose. Tests that measure memory are excluded, as the sanitizer
# holds back freed memory; those that count objects run.
SANITIZED := build/sanitize
WATCHED = PYTHONPATH=tests/sanitize PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)"

sanitize: tools  ## Run tests of the extension under AddressSanitizer and UBSan
	rm -rf $(SANITIZED)/root $(SANITIZED)/*.whl
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir $(SANITIZED) \
		--config-settings=build-dir=$(SANITIZED)/cmake --config-settings=install.strip=false \
		--config-settings=cmake.define.TORCH2ORT_SANITIZE=ON .
	$(BIN)/python -m zipfile -e $(SANITIZED)/torch2ort-*.whl $(SANITIZED)/root
	$(WATCHED) $(BIN)/python -m pytest --quiet --timeout 900 tests/runtime_ext tests/stock tests/training tests/differentiate \
		-k 'not memory'
	$(WATCHED) $(BIN)/python -m tests.random_programs --seed 1 --programs 24 --minutes 60 --seconds 900 --loud

# Each environment of these is made, used and removed, unless NOX_ARGS='-- --keep'; a version that the machine cannot
# install is "not tried", which is not a failure.
test-matrix: tools  ## Run tests on every torch, Python and onnxruntime that is supported; hours
	$(BIN)/nox --session wheel
	$(BIN)/nox --session matrix $(NOX_ARGS); status=$$?; $(BIN)/nox --session table; exit $$status

test-newest: tools  ## Run tests on the ends of the supported versions
	$(BIN)/nox --session wheel
	$(BIN)/nox --session newest $(NOX_ARGS); status=$$?; $(BIN)/nox --session table -- newest; exit $$status

# clang-tidy uses the build's compile commands.
lint: tools  ## Check style and types, and the C++ for mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	printf '%s\n' $(filter %.cpp,$(CPP)) | xargs -n 2 -P "$$(nproc)" \
		$(BIN)/clang-tidy --quiet -p "$$(dirname "$$(ls build/cp*/compile_commands.json | head -n 1)")"

format: tools  ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

wheel: tools  ## Build a wheel into dist/ and test it in an empty environment
	rm -f dist/torch2ort-*.whl
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python tests/wheel/check.py dist/torch2ort-*.whl constraints.txt

# Advice about the site's generator is of no use in a build log.
docs: tools  ## Build the site into build/site; a broken link is an error
	$(INSTALL) '.[cpu,dev,docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: tools  ## Print the benchmarks' ratios to eager PyTorch
	$(INSTALL) '.[cpu,dev,bench]'
	$(BIN)/python benchmarks/_machine.py
	$(BIN)/python benchmarks/pythonop_overhead.py
	$(BIN)/python benchmarks/large_tensors.py
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/compile.py
	$(BIN)/python benchmarks/precision.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/inference.py
	$(BIN)/python benchmarks/artifacts.py
	$(BIN)/python benchmarks/call_policy.py
	$(BIN)/python benchmarks/io_schema.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/guards.py
	$(BIN)/python benchmarks/files.py

# The machine may be offline, so nothing is installed: GPU_PYTHON must have torch, onnxruntime-gpu, torch2ort and
# pytest.
GPU_PYTHON ?= python3
PARTS ?=

check-gpu:  ## On a machine with a GPU, run the checks that need one, and print a table
	$(GPU_PYTHON) tests/check_gpu.py $(PARTS)

clean:  ## Remove the environments and everything built
	rm -rf $(VENV) build dist
