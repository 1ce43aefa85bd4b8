# Every target does its own set-up: a virtual environment in the checkout, with the tested versions of constraints.txt.
# PYTHON chooses the interpreter the environment is made from; VENV=path uses another environment.
# JOBS is how many tests run at a time.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
# A file's tests run in one process, which share compiled kernels; tests/conftest.py puts the longest files first.
PYTEST := -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DELETE_ON_ERROR:
.PHONY: help demo test test-long test-gpu sample sample-gpu fuzz lint format types bench docs dist versions clean

help:
	@echo "make demo    real text through a trained model: eager, Inductor and fusion side by side"
	@echo "make test    the test suite           (ARGS='-k mask' passes options on to pytest)"
	@echo "make test-long  with the exhaustive cases (over an hour)"
	@echo "make test-gpu   on a GPU that is not there: torch for CUDA on a stand-in for its runtime (g++; 5 GB, as sample)"
	@echo "make sample  some of the tests with the oldest and the newest torch (TORCH='2.12.1': others; 5 GB each,"
	@echo "             in .venv-torch-*, or in the folder that TORCHES names)"
	@echo "make sample-gpu  some of test-gpu, in a few minutes"
	@echo "make fuzz    300 random functions, others at every commit"
	@echo "make lint    ruff: lint and format    (make format mends what it can)"
	@echo "make types   pyright"
	@echo "make docs    the pages as a site, in build/site"
	@echo "make dist    sdist and wheel in build/dist, checked, and tried outside of the checkout"
	@echo "make versions  the sample with every torch, and the wheel with every Python, for docs/versions.md"
	@echo "make bench   attention on this CPU beside its peers (ARGS='--quick' passes options on to it)"

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras; it is as old as the last installation that went through.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@

# By itself: it asks for torchvision, which indexes have for CUDA alone. Its models do without.
$(VENV)/.installed-timm: constraints.txt | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt timm
	@touch $@

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/quickstart.py $(ARGS)

# Workers, and processes that tests start, find what Python has parsed before, whatever the environment says.
test test-long: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.installed-test $(VENV)/.installed-timm
	$(BIN)/python -m pytest $(PYTEST) $(ARGS)

test-long: $(VENV)/.installed-test $(VENV)/.installed-timm
	$(BIN)/python -m pytest $(PYTEST) -m "long or not long" $(ARGS)

# The environments of other versions of torch are made once, and kept.
sample: $(BIN)/pip
	$(BIN)/python .ci/torches.py --jobs $(JOBS) $(TORCH)

# Without the models, but for a step of BERT.
SAMPLE_GPU := test_device or bert and sdpa and autocast and training

test-gpu: $(BIN)/pip
	$(BIN)/python .ci/torches.py --gpu $(or $(TORCH),2.11.0)

sample-gpu: $(BIN)/pip
	$(BIN)/python .ci/torches.py --gpu --only '$(SAMPLE_GPU)' 2.11.0

SEEDS ?= new:300
fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz functions --seeds $(SEEDS) --reduce 10 --minutes 5 $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Examples and benchmarks are checked too: their imports must resolve.
types: $(VENV)/.installed-dev $(VENV)/.installed-test $(VENV)/.installed-timm $(VENV)/.installed-demo $(VENV)/.installed-bench
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.cpu.attention $(ARGS)

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

dist: $(VENV)/.installed-release $(VENV)/.installed-test
	.ci/dist $(BIN)/python build/dist

versions: dist
	$(BIN)/python .ci/torches.py --jobs $(JOBS) --write 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
	$(BIN)/python .ci/versions.py build/dist/*.whl $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
