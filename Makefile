# `make demo` trains a small model, `make test` runs every check, `make soak` the fault tests at full size.
# Each creates the environment .venv from the pinned versions in constraints.txt. Needs Python >= 3.11.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-gpu soak pictures constraints clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp  ## train on a text by Shakespeare, plot the loss, generate text
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo

test: $(VENV)/test.stamp $(VENV)/llama.stamp $(VENV)/chromium.stamp  ## check format, lint, imports and types, run the tests
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

docs: $(VENV)/docs.stamp  ## build the documentation site into build/site, without the network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

# Uses the active environment, not .venv, because the CUDA build of torch depends on the machine.
test-gpu:  ## tests that need a CUDA device, in the active environment
	scripts/check-gpu

soak: $(VENV)/test.stamp  ## run the fault tests at full size: kills, I/O errors, full disks and corrupted checkpoints
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/soak

pictures: $(VENV)/test.stamp $(VENV)/chromium.stamp  ## make the recording, screenshots and plots of the documentation again
	$(BIN)/python scripts/pictures.py

# torch is installed first, so that no later package pulls in another build. If pip would choose a CUDA build, point it
# to the CPU builds in its own configuration (find-links or extra-index-url).
$(VENV)/torch.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "whimbrel needs python >= 3.11, $(PYTHON) is %d.%d: make PYTHON=python3.11" % v[:2])'
	@echo "installing the pinned packages into $(VENV) (once)"
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --constraint constraints.txt torch==2.13.0
	@$(BIN)/python -c 'import torch; print("note: pip chose a CUDA build of torch; it works, but a CPU build is smaller") if torch.version.cuda else None'
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) install --constraint constraints.txt --editable '.[gguf,plot,serve]'
	@touch $@

$(VENV)/docs.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) install --constraint constraints.txt --editable '.[docs]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) install --constraint constraints.txt --editable '.[dev,docs,gguf,hf,hub,lowbit,plot,ray,remote,serve,tensorboard]'
	@touch $@

# For tests only: llama.cpp runs the GGUF files that `whimbrel export` writes.
$(VENV)/llama.stamp: $(VENV)/torch.stamp scripts/install-llama-cpp
	scripts/install-llama-cpp $(VENV)/llama.cpp
	@test ! -d $(VENV)/llama.cpp || touch $@

# For tests only: Chromium opens the chat page.
$(VENV)/chromium.stamp: $(VENV)/torch.stamp scripts/install-chromium
	scripts/install-chromium
	@! command -v chromedriver >/dev/null || touch $@

constraints: $(VENV)/test.stamp  ## regenerate constraints.txt from the packages in .venv
	{ sed -n '/^#/p' constraints.txt; $(PIP) freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//'; } > $(VENV)/constraints.txt
	mv $(VENV)/constraints.txt constraints.txt

clean:  ## remove the environment, the site and tool caches
	rm -rf $(VENV) build/site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
