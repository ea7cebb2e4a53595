# `make generate` and `make test` do all of the set-up themselves; with nothing changed they start at once.
# PYTHON=...  the Python to make .venv with (3.11 or newer); by default the first one found
# PROMPT=...  the prompt of `make generate`
# TESTS=...   arguments of pytest, for instance TESTS=tests/convert

VENV := .venv
BIN := $(VENV)/bin
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.14 python
PROMPT = Karl bakes 12 trays of rolls, with 8 on each tray. He sells 70 of them. How many rolls does Karl have left?
TESTS = -n 2
override export PROMPT_TEXT := $(value PROMPT)

# A stamp is made only when everything before it has worked; a newer pyproject.toml or Python makes it stale.
BASE := $(VENV)/.base
TEST := $(VENV)/.test
DEV := $(VENV)/.dev
# Where the Python of .venv is gone (upgraded away), so is what was installed for it.
$(shell test -x $(BIN)/python || rm -f $(BASE) $(TEST) $(DEV))
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# Only the tests use torch, and only its CPU build: a plain `pip install torch` brings gigabytes of CUDA on Linux. An
# installed or locally available build is taken before PyTorch's own index of CPU builds is asked.
TORCH := 2.13.0
GPU_STACK := jax==0.11.2 flax==0.12.10 numpy pytest hypothesis jaxtyping beartype
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: generate test lower lint format types check
.DELETE_ON_ERROR:

generate: $(BASE)
	@$(BIN)/python -m fdllm_jax.generate "$$PROMPT_TEXT"

test: $(TEST)
	$(BIN)/python -m pytest $(TESTS)

# Lowers the kernels to CUDA on the versions that GPUs run with, where there is a Python 3.12 for them.
lower:
	@for python in python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12); do \
	  "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || continue; \
	  test -x .venv-3.12/bin/python || "$$python" -m venv .venv-3.12 || exit 1; \
	  .venv-3.12/bin/python -m pip --disable-pip-version-check install --quiet $(GPU_STACK) || exit 1; \
	  exec .venv-3.12/bin/python -m pytest tests/pallas_kernels -k lower; \
	done; \
	echo "Found no Python 3.12: the kernels are lowered on the versions of $(VENV) only"

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV)
	$(BIN)/pyright

check: lint types test lower

$(BIN)/python:
	@for python in $(or $(PYTHON),$(CANDIDATES)); do \
	  "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue; \
	  echo "Making $(VENV) with $$("$$python" --version)"; \
	  exec "$$python" -m venv --clear $(VENV); \
	done; \
	echo "Found no Python 3.11 or newer with its venv module (tried: $(or $(PYTHON),$(CANDIDATES))). Install one" \
	  "(Debian: apt install python3-venv), or name it: make generate PYTHON=/path/to/python3.12" >&2; \
	exit 1

$(BASE): pyproject.toml $(BIN)/python
	@echo "Installing fdllm-jax (a minute or two, the first time only)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	@$(PIP) --editable .
	@touch $@

$(TEST): $(BASE)
	@echo "Installing what the tests need"
	@$(PIP) 'torch==$(TORCH)+cpu' 2>/dev/null || $(PIP) --extra-index-url $(CPU_INDEX) 'torch==$(TORCH)'
	@$(PIP) --editable '.[test]'
	@touch $@

$(DEV): $(TEST)
	@echo "Installing what development needs"
	@$(PIP) --editable '.[test,dev]'
	@touch $@
