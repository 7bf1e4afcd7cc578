# Commands of this repository; `make help` lists them. Everything installs into .venv and .cache, nothing elsewhere
# but the system packages that tests/support/system_packages.sh names before it installs them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# A folder or an index with the torch build to use; without either pip's own configuration decides.
TORCH_INDEX_URL ?=
LOCK_FLAGS := --generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate --universal --python-version 3.11
LOCK_CUDA := $(foreach p,cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx,--no-emit-package $(p))
# Most tests wait for processes more than they compute, so more workers than cores pay. One torch thread each:
# with more, workers spin against each other and a test of seconds takes minutes.
WORKERS ?= 3
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
export HF_HUB_OFFLINE := 1
export WANDB_MODE ?= offline

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

# --- set-up ---------------------------------------------------------------------------------------------

.PHONY: setup system
system: ## install missing system packages (names them first)
	@bash tests/support/system_packages.sh

setup: system $(VENV)/.ready ## system packages, .venv with the locked packages, the page
	@$(if $(filter setup,$(MAKECMDGOALS)),echo 'ready: `make demo` shows everything; `. $(BIN)/activate` puts dflashctl and dflash-train on your PATH',:)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than 3.11; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) '$(TORCH)'
	@touch $@

$(VENV)/.locked: requirements/dev.txt requirements/model.txt $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/model.txt
	@touch $@

WEBUI_SOURCES := $(shell find webui -path webui/node_modules -prune -o -type f -print 2>/dev/null)
$(VENV)/.ready: pyproject.toml $(VENV)/.locked $(WEBUI_SOURCES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: lock
lock: ## resolve requirements/*.in to locks with hashes and without addresses
	@for name in supervisor trainer plot dev; do $(BIN)/uv pip compile $(LOCK_FLAGS) $(if $(FIND_LINKS),--find-links $(FIND_LINKS)) \
	  --no-emit-package torch --no-emit-package triton --no-emit-package setuptools $(LOCK_CUDA) \
	  -c requirements/torch.txt requirements/$$name.in -o requirements/$$name.txt --quiet || exit 1; done

# --- static checks --------------------------------------------------------------------------------------

.PHONY: fmt lint types imports check
fmt: ## format the code
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lint:
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports --no-cache

check: setup lint types imports ## the static part of `make test`

# --- tests ----------------------------------------------------------------------------------------------

.PHONY: test unit contract integration browser webui gpu
unit contract integration browser: setup
	$(PYTEST) tests/$@ -q

webui: setup ## unit tests and types of the page
	$(BIN)/python webui/npm.py run check

test: check webui ## everything that CI runs
	$(PYTEST) tests/unit tests/contract tests/integration tests/browser -q

gpu: setup ## tests that need an NVIDIA GPU (skipped with a reason elsewhere)
	$(BIN)/python -m pytest tests/gpu -q

# --- the product ----------------------------------------------------------------------------------------

.PHONY: demo bench docs
demo: setup ## deploy, train a real drafter on a real model, watch it at a local page (DEMO_EXIT=1: end when finished)
	@$(BIN)/dflashctl demo $(if $(DEMO_EXIT),--exit)

bench: setup ## ratios against the bare commands, in one run
	@$(BIN)/python -m benchmarks

docs: setup ## write the generated reference pages
	$(BIN)/python -m docs.generate
