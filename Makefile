# `make demo` and `make test` need Python 3.11, g++ and make; all else is installed into .venv-stock, with today's
# onnxruntime, and .venv, with onnxruntime-training, as one environment holds one onnxruntime. The stamp .built in
# each lets a second call reuse it all, until a file that the build reads changes.

PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := training,examples,test,dev
STOCK := .venv-stock
STOCK_EXTRAS := cpu,examples,test-core
INTO_STOCK := $(STOCK)/bin/pip install --quiet --constraint constraints.txt \
	--config-settings=build-dir=build/stock --editable
# Tests of one file stay in one process, so that what a module sets up is set up once.
WORKERS ?= 2
PYTEST := -m pytest --quiet --numprocesses $(WORKERS) --dist loadfile
# What onnxruntime-training leaves to a stock onnxruntime in `make test`.
LEFT_TO_STOCK = $(patsubst --ignore=%,%,$(file < tests/main_suite.txt))
CPP := $(wildcard runtime_ext/*.cpp runtime_ext/*.h runtime_ext/*/*.cpp runtime_ext/*/*.h)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build build-stock demo demo-training test test-long test-matrix test-newest sanitize check-gpu lint format wheel docs bench clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- the environment ---------------------------------------------------------------------------------

$(BIN)/python $(STOCK)/bin/python:
	@test -n "$(PYTHON)" || { echo "torch2ort's build needs Python 3.11 (onnxruntime-training-cpu 1.19.2 has no \
	wheel for a later one). Install it, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(@:/bin/python=)

# Packages from the index that are already there are kept. Each environment has an extension of its own, compiled
# again (ten seconds): pip builds in an environment that is new each time, and CMake starts afresh in a new one.
BUILT_FROM := pyproject.toml constraints.txt CMakeLists.txt $(CPP)

$(VENV)/.built: $(BUILT_FROM) | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

$(STOCK)/.built: $(BUILT_FROM) | $(STOCK)/bin/python
	$(INTO_STOCK) '.[$(STOCK_EXTRAS)]'
	@touch $@

build: $(VENV)/.built  ## Make .venv and compile the extension

build-stock: $(STOCK)/.built  ## Make .venv-stock, with today's onnxruntime

# --- what people run ---------------------------------------------------------------------------------

demo: build-stock  ## Train the example transformer eager and on ONNX Runtime, side by side
	$(STOCK)/bin/python examples/char_transformer.py

demo-training: build  ## Do the same on onnxruntime-training, by its own gradients
	$(BIN)/python examples/char_transformer.py

test: build build-stock  ## Run the tests, and those of the joint engine on both onnxruntimes
	$(BIN)/python $(PYTEST) @tests/main_suite.txt
	$(BIN)/python $(PYTEST) --engine joint @tests/joint_suite.txt
	$(STOCK)/bin/python $(PYTEST) @tests/stock_suite.txt

test-long: build build-stock  ## Run the tests that take minutes, and more of the tests on today's onnxruntime
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[deepspeed]'
	TORCH2ORT_LONG=1 $(BIN)/python $(PYTEST) -m long
	$(BIN)/python $(PYTEST) $(LEFT_TO_STOCK)
	TORCH2ORT_LONG=1 $(BIN)/python $(PYTEST) --engine joint -m long tests/dynamo
	$(BIN)/python $(PYTEST) --engine joint --timeout 600 tests/runtime/test_chains.py tests/models
	$(STOCK)/bin/python $(PYTEST) @tests/stock_long_suite.txt
	TORCH2ORT_LONG=1 $(STOCK)/bin/python $(PYTEST) --dist load tests/ops/test_opinfo.py tests/leaks
	TORCH2ORT_LONG=1 $(STOCK)/bin/python $(PYTEST) --dist load -m long tests/random_programs
	$(INTO_STOCK) '.[$(STOCK_EXTRAS),loops]'
	TORCH2ORT_LONG=1 $(STOCK)/bin/python $(PYTEST) tests/loops

# Python's objects come from the C library's heap, where AddressSanitizer sees them. What a process still holds at
# its end is no report: CPython, torch and onnxruntime hold much on purpose. Tests that measure memory are left out,
# as the sanitizer holds back what is freed; those that count objects run.
SANITIZED := build/sanitize
WATCHED = PYTHONPATH=tests/sanitize PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)"

sanitize: build build-stock  ## Run tests of the extension under AddressSanitizer and UBSan
	rm -rf $(SANITIZED)/root $(SANITIZED)/*.whl
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir $(SANITIZED) \
		--config-settings=build-dir=$(SANITIZED)/cmake --config-settings=install.strip=false \
		--config-settings=cmake.define.TORCH2ORT_SANITIZE=ON .
	$(BIN)/python -m zipfile -e $(SANITIZED)/torch2ort-*.whl $(SANITIZED)/root
	$(WATCHED) $(BIN)/python -m pytest --quiet tests/runtime_ext -k 'not memory_behind'
	$(WATCHED) $(STOCK)/bin/python -m pytest --quiet --timeout 900 tests/stock tests/engines/joint -k 'not memory'
	$(WATCHED) $(BIN)/python -m tests.random_programs --seed 1 --programs 24 --minutes 60 --seconds 900 --loud

# Each environment of these is made, used and removed, but with NOX_ARGS='-- --keep'; a version that the machine
# cannot have is "not tried", which is no failure.
test-matrix: build  ## Run tests on every torch, Python and onnxruntime that is supported; hours
	$(BIN)/nox --session wheel
	$(BIN)/nox --session matrix $(NOX_ARGS); status=$$?; $(BIN)/nox --session table; exit $$status

test-newest: build  ## Run tests on the newest torch, and on the newest and the oldest Python
	$(BIN)/nox --session wheel
	$(BIN)/nox --session newest $(NOX_ARGS); status=$$?; $(BIN)/nox --session table -- newest; exit $$status

# clang-tidy compiles as the build does.
lint: build  ## Check style and types, and the C++ for mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	printf '%s\n' $(filter %.cpp,$(CPP)) | xargs -n 2 -P "$$(nproc)" \
		$(BIN)/clang-tidy --quiet -p "$$(dirname "$$(ls build/cp*/compile_commands.json | head -n 1)")"

format: build  ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

wheel: build  ## Build a wheel into dist/ and test it in an empty environment
	rm -f dist/torch2ort-*.whl
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python tests/wheel/check.py dist/torch2ort-*.whl constraints.txt

# Nobody reads advice about the site's generator in a log of the build.
docs: build  ## Build the site into build/site; a broken link is an error
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS),docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: build build-stock  ## Print the benchmarks' ratios to eager PyTorch
	$(BIN)/python benchmarks/_machine.py
	$(BIN)/python benchmarks/pythonop_overhead.py
	$(BIN)/python benchmarks/large_tensors.py
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/compile.py
	$(BIN)/python benchmarks/precision.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/call_policy.py
	$(BIN)/python benchmarks/io_schema.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/guards.py
	$(BIN)/python benchmarks/cache_start.py
	$(INTO_STOCK) '.[$(STOCK_EXTRAS),bench]'
	$(STOCK)/bin/python benchmarks/_machine.py
	$(STOCK)/bin/python benchmarks/pythonop_overhead.py
	$(STOCK)/bin/python benchmarks/large_tensors.py
	$(STOCK)/bin/python benchmarks/train_step.py
	$(STOCK)/bin/python benchmarks/precision.py
	$(STOCK)/bin/python benchmarks/memory.py
	$(STOCK)/bin/python benchmarks/fused_regions.py
	$(STOCK)/bin/python benchmarks/autotune.py
	$(STOCK)/bin/python benchmarks/compile.py
	$(STOCK)/bin/python benchmarks/inference.py
	$(STOCK)/bin/python benchmarks/artifacts.py
	$(STOCK)/bin/python benchmarks/cache_start.py

# That machine may reach no index, so that nothing is installed: GPU_PYTHON has torch, onnxruntime-gpu, torch2ort and
# pytest already.
GPU_PYTHON ?= python3
PARTS ?=

check-gpu:  ## On a machine with a GPU, run what needs one, and print a table
	$(GPU_PYTHON) tests/check_gpu.py $(PARTS)

clean:  ## Remove the environments and everything built
	rm -rf $(VENV) $(STOCK) build dist
