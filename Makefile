# Start with `make demo` or `make test`, which set up .venv. Versions are pinned in requirements/.
#
#   PYTHON      interpreter that creates .venv (3.11 or newer)
#   TORCH_SPEC  requirement that pip installs if .venv has no torch yet, e.g. "torch==2.13.0"
#   DATA        make demo: a click log in the Criteo format (.txt or .gz) instead of a synthetic one
#   JOBS        test files that make test runs in parallel
#   SET         newest or oldest: the versions of torch, torchrec and fbgemm in requirements/SET.txt
#               instead of the usual ones, in a virtual environment of its own
#   ARGS        more arguments for pytest (make test), `oper demo` (make demo), or the fault injection
#               (make test-faults, e.g. ARGS="--tries 3 --only kill")

PYTHON ?= python3
SET ?=
VENV ?= $(if $(SET),build/venv-$(SET),.venv)
BIN := $(VENV)/bin
# pip would compile every module, though most are never imported. Python compiles the others on
# import, unless it may not write the result.
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install \
  $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
DATA ?=
ARGS ?=

# Test files run in parallel. Most tests spend half of the time waiting for their own processes, so
# waiting threads must not keep a core busy. Tests marked `alone` follow one at a time.
JOBS ?= 3
ALONE = $$($(BIN)/python -c 'from tests.schedule import ALONE; print(*ALONE)')
RANDOM_PROBLEMS = $$($(BIN)/python -c 'from tests.schedule import RANDOM_PROBLEMS; print(*RANDOM_PROBLEMS)')
BESIDE = OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# A machine without a GPU must not download gigabytes of CUDA libraries. On x86-64 Linux, the plain
# version means the CUDA build, so request the CPU build by its full version there.
KIND := $(if $(wildcard /dev/nvidiactl),gpu,cpu)
ifneq ($(SET),)
TORCH_SPEC := $(shell grep '^torch==' requirements/$(SET).txt)
endif
ifeq ($(KIND)-$(shell uname -sm),cpu-Linux x86_64)
TORCH_SPEC ?= torch==2.13.0+cpu
else
TORCH_SPEC ?= torch==2.13.0
endif

.PHONY: help setup build demo test test-nightly test-versions test-faults test-sanitizers lint docs wheel-test sdist wheels clean
.DEFAULT_GOAL := help

help:
	@echo "make demo [DATA=train.txt]  statistics, plan and training, compared with TorchRec"
	@echo "make test [ARGS=...]        the tests"
	@echo "make test-nightly           the tests that take too long for every change"
	@echo "make test-versions SET=...  TorchRec's modules, plans and checkpoints with other versions"
	@echo "make test-faults            kill, stop, slow down, fill up, damage; prints a table"
	@echo "make test-sanitizers        the native libraries under the compiler's sanitizers"
	@echo "make lint                   ruff, mypy and codespell"
	@echo "make docs                   the documents as a site in build/site; links, blocks, spelling"
	@echo "make wheel-test             build a wheel from a source distribution, install it elsewhere, try it"
	@echo "make sdist wheels           a release in dist/: sources, and manylinux wheels (needs docker)"
	@echo "make setup                  only install into $(VENV) and build"
	@echo "make clean                  remove what was built ($(VENV) stays)"

setup: $(VENV)/.oper-installed build

$(BIN)/python:
	@echo "== making $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "OPER needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "cannot make $(VENV); install python3-venv" >&2; exit 1; }

$(VENV)/.oper-installed: Makefile pyproject.toml $(wildcard requirements/*.txt) | $(BIN)/python
	@echo "== torch"
	@$(BIN)/python -c 'import torch; print("torch", torch.__version__, "is there")' 2>/dev/null \
	  || $(PIP_INSTALL) $(TORCH_SPEC) \
	  || { echo "pip finds no '$(TORCH_SPEC)'; taking the default build, which may be large" >&2; \
	       $(PIP_INSTALL) $(firstword $(subst +, ,$(TORCH_SPEC))); } \
	  || { echo "Install a build of torch that suits this machine into $(VENV) as pytorch.org" \
	       "shows, then run make again; or name one with TORCH_SPEC=..." >&2; exit 1; }
	@echo "== what OPER and its tests need ($(KIND)), while the host library is compiled"
	@$(PIP_INSTALL) --quiet $$(grep -E '^(setuptools|numpy)==' requirements/common.txt)
	@# A set of versions may bring another torch, which must be there before the library is compiled.
	@$(if $(SET),true,$(BIN)/python setup.py -q build_ext --inplace) & build_pid=$$!; status=0; \
	{ $(PIP_INSTALL) --quiet -r requirements/$(KIND).txt \
	  && $(PIP_INSTALL) --quiet --no-deps -r requirements/$(or $(SET),torchrec).txt; } || status=1; \
	wait $$build_pid || status=1; exit $$status
	@$(PIP_INSTALL) --quiet --no-build-isolation --no-deps --editable .
	@touch $@

build: | $(VENV)/.oper-installed
	@$(BIN)/python setup.py -q build_ext --inplace

demo: setup
	@$(BIN)/oper demo $(if $(DATA),--data "$(DATA)") $(ARGS)

test: setup
ifeq ($(strip $(ARGS)),)
	@status=0; \
	$(BESIDE) -m "not slow and not alone" || status=1; \
	$(BIN)/python -m pytest -m "alone and not slow" $(ALONE) || status=1; \
	exit $$status
else
	@$(BIN)/python -m pytest $(ARGS)
endif

# See tests/schedule.py.
test-nightly: setup
	@status=0; \
	$(BESIDE) -m "slow and not alone" || status=1; \
	$(BESIDE) -m "not slow" --hypothesis-profile=nightly $(RANDOM_PROBLEMS) || status=1; \
	$(BIN)/python -m pytest -m "slow and alone" $(ALONE) || [ $$? = 5 ] || status=1; \
	exit $$status

# What depends most on the versions of torch, torchrec and fbgemm; SET=newest or SET=oldest.
test-versions: setup
	$(BESIDE) $$($(BIN)/python -c 'from tests.schedule import VERSIONS; print(*VERSIONS)') $(ARGS)
	$(BIN)/oper bench train --quick

test-faults: setup
	@$(BIN)/python -W ignore -m tests.faults $(ARGS)

test-sanitizers: setup
	@$(BIN)/python -m tests.sanitizers $(ARGS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/mypy
	git ls-files -z | xargs -0 $(BIN)/codespell

docs: setup
	$(BIN)/codespell *.md docs
	@$(PIP_INSTALL) --quiet -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python -m pytest tests/test_docs.py $(ARGS)

wheel-test: setup
	$(BIN)/python -m pytest tests/test_wheel.py $(ARGS)

sdist: setup
	$(BIN)/python setup.py -q sdist

# The settings are in pyproject.toml.
wheels: setup
	$(PIP_INSTALL) --quiet cibuildwheel==4.3.3
	$(BIN)/python -m cibuildwheel --platform linux --output-dir dist

clean:
	rm -rf build dist *.egg-info oper/_lib/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find oper tests -name __pycache__ -prune -exec rm -rf {} +
