# One command for a newcomer (demo), one for tests (test); each builds .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
NEWEST := .venv-newest/bin
.DEFAULT_GOAL := help
# Tests start hundreds of processes: without bytecode each compiles Octavo anew, and pytest rewrites every test.
export PYTHONDONTWRITEBYTECODE :=
.PHONY: help demo test test-long test-eval test-lightning test-newest check docs models-table lint format clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/ready  ## install, then train a small Llama in FP8 on real text, on this machine's CPU
	$(BIN)/octavo train presets/demo.toml

test: .venv/ready  ## the tests that need no GPU, but for further cases of some
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not long and not gpu"

check: lint  ## under 3 minutes, for every ten: lint, types, and the tests of rules, numbers, run files and plans
	$(BIN)/python -m pytest -q -n 2 -m "not long and not gpu" tests/test_architecture.py tests/test_docs.py tests/contract \
		tests/config tests/fp8 tests/plan tests/collectives

test-long: .venv/ready  ## those further cases
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m long

.venv-eval/bin/python:
	$(PYTHON) -m venv .venv-eval

test-eval: .venv-eval/bin/python  ## lm-eval's tasks in training, in .venv-eval with the extra eval
	.venv-eval/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,eval]'
	.venv-eval/bin/python -m pytest -q -n 0 tests/train/test_lm_tasks.py

.venv-lightning/bin/python:
	$(PYTHON) -m venv .venv-lightning

test-lightning: .venv-lightning/bin/python  ## Lightning's plug-in for Transformer Engine, in .venv-lightning
	.venv-lightning/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' 'lightning>=2.6'
	.venv-lightning/bin/python -m pytest -q -n 0 tests/compat/test_accelerate.py -k lightning

.venv-newest/bin/python:
	$(PYTHON) -m venv .venv-newest

# The newest releases are asked for anew each time.
test-newest: .venv-newest/bin/python  ## types and every test with the newest releases that pyproject.toml admits, in .venv-newest
	$(NEWEST)/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[dev]'
	$(NEWEST)/python -m pip list --disable-pip-version-check | grep -E '^(torch|triton|transformers) '
	$(NEWEST)/python -m mypy
	$(NEWEST)/python -m pytest -q -n 2 --dist loadgroup

docs: .venv/ready  ## the pages of docs/ as a site in docs/_build/html; a warning is an error
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

models-table: .venv/ready  ## rewrite the table of docs/models.md by training steps of tiny models
	$(BIN)/python tests/models

lint: .venv/ready  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready  ## mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environments and every run
	rm -rf .venv .venv-eval .venv-lightning .venv-newest runs
