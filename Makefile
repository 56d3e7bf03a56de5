# Two commands for a fresh machine: `make demo` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready

.PHONY: demo test check bench setup clean
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
	@$(BIN)/outrider generate --compare --max-new-tokens 96

test: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(MAKE) --no-print-directory test

bench: $(READY)
	@$(BIN)/python benchmarks/engine.py

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
