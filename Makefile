# `make demo` trains a small model here, `make test` runs every check, `make soak` the fault lanes at full size.
# Each makes its own environment in .venv from the pinned versions in constraints.txt; they need python >= 3.11.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu soak constraints clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp  ## train on the bundled corpus, draw the loss curve, write verse
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo

test: $(VENV)/test.stamp $(VENV)/llama.stamp $(VENV)/chromium.stamp  ## format, lint, import rule, types, tests
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

# Uses the active environment, not .venv: the CUDA build of torch and its libraries are the machine's own.
test-gpu:  ## tests that need a CUDA device, in the active environment
	scripts/check-gpu

soak: $(VENV)/test.stamp  ## kill, cut short, fill the disk and damage checkpoints thousands of times
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/soak

# torch goes first and alone, so that nothing later asks for another build of it. Where pip would choose a build that
# carries CUDA, tell pip (its own settings: find-links or an extra index) where the CPU builds are.
$(VENV)/torch.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "whimbrel needs python >= 3.11, $(PYTHON) is %d.%d: make PYTHON=python3.11" % v[:2])'
	@echo "installing the pinned packages into $(VENV) (once)"
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --constraint constraints.txt torch==2.13.0
	@$(BIN)/python -c 'import torch; print("note: pip chose a CUDA build of torch; it works, but a CPU build is smaller") if torch.version.cuda else None'
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) install --constraint constraints.txt --editable '.[plot]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) install --constraint constraints.txt --editable '.[dev,gguf,hf,hub,lowbit,plot,ray,serve,tensorboard]'
	@touch $@

# A peer, not a dependency: it runs the GGUF files that `whimbrel export` writes.
$(VENV)/llama.stamp: $(VENV)/torch.stamp scripts/install-llama-cpp
	scripts/install-llama-cpp $(VENV)/llama.cpp
	@test ! -d $(VENV)/llama.cpp || touch $@

# Another peer: it opens the chat page.
$(VENV)/chromium.stamp: $(VENV)/torch.stamp scripts/install-chromium
	scripts/install-chromium
	@! command -v chromedriver >/dev/null || touch $@

constraints: $(VENV)/test.stamp  ## write constraints.txt anew from what .venv holds
	{ sed -n '/^#/p' constraints.txt; $(PIP) freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//'; } > $(VENV)/constraints.txt
	mv $(VENV)/constraints.txt constraints.txt

clean:  ## remove the environment and the tools' caches
	rm -rf $(VENV) .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
