# Each target is enough by itself on a fresh clone: Python, make, a C++ compiler and a package index.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
SOURCES := setup.py pyproject.toml memkern/quant/codec.py memkern/schemas.py $(wildcard csrc/*.py csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh csrc/*/*/*.h csrc/*/*/*.cpp)
# Written by csrc/generate.py.
GENERATED := csrc/core/tables.h csrc/core/hyperparameters.h csrc/common/schemas.h

.PHONY: demo test lint bench gpu format clean

# Trains a small GPT twice, with torch's AdamW and GELU and with 8-bit states and 3-bit GELU: same loss, a quarter of
# the state, less saved for the backward pass.
demo: $(VENV)/.installed
	$(BIN)/python -m memkern train --compare --activation-bits 3 --out out/demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest tests $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(filter csrc/%,$(filter-out $(GENERATED),$(SOURCES)))

format: $(VENV)/.installed
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
	$(BIN)/clang-format -i $(filter csrc/%,$(filter-out $(GENERATED),$(SOURCES)))

# Peers are optional: the table names one that cannot be installed as absent. Of timm only the optimizers are used,
# which need torch alone.
bench: $(VENV)/.installed
	for peer in bitsandbytes torchao deepspeed "--no-deps timm"; do $(BIN)/python -m pip install -q $$peer || true; done
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# On a machine with a GPU, without a network: uses the torch that $(PYTHON) already has. Under 8 minutes on an H200.
gpu:
	$(PYTHON) -m tests.gpu $(GPU_ARGS)

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$(TORCH)" "setuptools>=77" ninja
	touch $@

$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[train,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist out *.egg-info $(GENERATED)
	find . -name '*.so' -not -path './.venv*' -delete
