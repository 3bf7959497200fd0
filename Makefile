# Each target is enough by itself on a fresh clone: Python, make, a C++ compiler and a package index.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
# Where it is set, every process compiles the modules that it imports: torch._dynamo's in 9 s in place of 4.
export PYTHONDONTWRITEBYTECODE :=
SOURCES := setup.py memkern/quant/codec.py memkern/schemas.py $(wildcard csrc/*.py csrc/*.cpp csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh csrc/*/*/*.h csrc/*/*/*.cpp)
# Written by csrc/generate.py.
GENERATED := csrc/core/tables.h csrc/core/hyperparameters.h csrc/common/schemas.h

JOBS   ?= 2
# The marks of pyproject.toml sort tests into three tiers: unmarked, full, long. gpu marks tests that need a GPU.
# worksteal gives each worker neighbouring tests, so that fixtures that a file's tests share are made once.
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

.PHONY: demo test test-all emulate test-long frameworks docs lint format bench evidence gpu clean

# Trains a small GPT twice, with torch's AdamW and GELU and with 8-bit states and 3-bit GELU: same loss, a quarter of
# the state, less saved for the backward pass.
demo: $(VENV)/.installed
	$(BIN)/python -m memkern train --compare --activation-bits 3 --out out/demo

# What to run before each push: 3 minutes on two cores.
test: $(VENV)/.installed
	$(PYTEST) -m "not full and not long and not gpu and not emulated" $(PYTEST_ARGS)

# What `make test` leaves out: ops and optimizers in Triton's interpreter, long comparisons.
test-all: lint
	$(PYTEST) -m "full and not long and not gpu and not emulated" $(PYTEST_ARGS)

# The CUDA and Triton kernels as CPU programs and on emulated GPUs, for every architecture: 10 minutes, 40 with empty caches. To run after
# changes of the files that lab/emulated.py lists: it records their hash (lab/results/emulated.json, committed), which `make test` compares.
emulate: $(VENV)/.installed
	$(BIN)/python -m lab.emulated --jobs $(JOBS)

# By hand: installs, sanitizers, long runs, whole models, every architecture. The results file is committed.
test-long: $(VENV)/.installed
	$(PYTEST) -m "long and not gpu" --outcomes benchmarks/results/long-tests.csv $(PYTEST_ARGS)

# What works with which version of which framework: runs the tests marked feature, and writes their outcomes and the table in docs/.
frameworks: $(VENV)/.installed
	$(PYTEST) -m "feature and not gpu" --features benchmarks/results/frameworks.csv $(PYTEST_ARGS)
	$(BIN)/python -m benchmarks.frameworks

# The site, in out/site. Warnings are errors: a link that leads nowhere, a name that the API reference does not find.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(VENV)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(filter-out %.py $(GENERATED),$(filter csrc/%,$(SOURCES)))

format: $(VENV)/.installed
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
	$(BIN)/clang-format -i $(filter-out %.py $(GENERATED),$(filter csrc/%,$(SOURCES)))

# Peers are optional: the table names those that cannot be installed.
bench: $(VENV)/.installed
	for peer in torchao deepspeed pytorch_optimizer; do $(BIN)/python -m pip install -q $$peer || true; done
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# docs/evidence.md: makes the runs that lab/results/convergence.csv lacks, on one thread; all of them take hours.
evidence: $(VENV)/.installed
	for peer in scikit-learn torchao pytorch_optimizer flashoptim gefen numba; do $(BIN)/python -m pip install -q $$peer || true; done
	$(BIN)/python -m lab.studies.convergence $(EVIDENCE_ARGS)
	$(BIN)/python -m pip uninstall -q -y gefen && $(BIN)/python -m pip install -q gefen-x || true  # both packages are imported as gefen
	$(BIN)/python -m lab.studies.convergence $(EVIDENCE_ARGS)
	$(BIN)/python -m lab.studies.convergence table

# On a machine with a GPU, with the torch that $(PYTHON) already has. lab/gpu/__main__.py lists the parts; to run one:
# make gpu PART=headline.
gpu:
	$(PYTHON) -m lab.gpu $(if $(PART),--part "$(PART)") $(GPU_ARGS)

# --no-compile: Python compiles a module at its first import, and few of these packages' 14,000 modules are imported.
PIP := $(BIN)/python -m pip install -q --no-compile

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)" "setuptools>=77" ninja
	touch $@

$(VENV)/.packages: $(VENV)/.torch pyproject.toml
	MEMKERN_BUILD=none $(PIP) --no-build-isolation -e ".[train,dev]"
	$(PIP) --no-deps timm  # its dependency torchvision, which may bring another torch, is not needed here
	touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	MEMKERN_BUILD=none $(PIP) --no-build-isolation -e ".[docs]"
	touch $@

# In place, so that after an edit only that file is compiled again.
$(VENV)/.installed: $(VENV)/.packages $(SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@

clean:
	rm -rf $(VENV) build dist out *.egg-info $(GENERATED) memkern/*.so
