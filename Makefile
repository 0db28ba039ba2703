# Everything runs from a virtual environment that `make venv` keeps up to date.
VENV   ?= .venv
PYTHON ?= python3

BIN    := $(abspath $(VENV))/bin
STAMP  := $(VENV)/.up-to-date
TORCH  := $(shell grep '^torch==' constraints.txt)

# Every test but those that need a GPU: tiers T0-T3.
NO_GPU := not gpu and not gpus
# Each worker has half of the files, so that fixtures are made once and rank tests find their pools
# running; who has done takes tests from the other.
SPREAD := -n 2 --dist worksteal

# pytest-benchmark, where a machine has it, warns beside xdist, and warnings are errors.
ON_GPU := python3 -m pytest tests/gpu -p no:benchmark --durations=15

# The site has an environment of its own, in which torch is not needed.
VENV_DOCS  ?= .venv-docs
BIN_DOCS   := $(abspath $(VENV_DOCS))/bin
STAMP_DOCS := $(VENV_DOCS)/.up-to-date
EXTRA_DOCS := import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")

# The trainers bring 43 packages, none of which the other tests need.
VENV_TRAINERS  ?= .venv-trainers
BIN_TRAINERS   := $(abspath $(VENV_TRAINERS))/bin
STAMP_TRAINERS := $(VENV_TRAINERS)/.up-to-date

# Wheel and source distribution are installed here, one after the other.
VENV_DIST ?= .venv-dist
BIN_DIST  := $(abspath $(VENV_DIST))/bin

.PHONY: help venv demo lint test test-long test-trainers test-gpu docs dist clean

help:
	@echo "make venv       create or update $(VENV)"
	@echo "make demo       run examples/demo.sh"
	@echo "make lint       ruff, mypy, import floors"
	@echo "make test       lint, then tiers T0-T3 (no GPU needed)"
	@echo "make test-long  the same tiers with the tests marked 'long'"
	@echo "make test-trainers  docs/trainers.md with Accelerate, transformers, TRL, PEFT, Lightning"
	@echo "make test-gpu   tier T4 with this machine's own python3 and torch"
	@echo "make docs       build the documentation site into site/"
	@echo "make dist       build wheel and sdist into dist/, install and try both"
	@echo "make clean      remove build outputs and caches"

venv: $(STAMP)

# torch goes in first and pinned: resolved from a range it may bring several gigabytes of wheels.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: venv
	PATH="$(BIN):$$PATH" bash examples/demo.sh

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: lint
	$(BIN)/python -m pytest $(SPREAD)

test-long: lint
	$(BIN)/python -m pytest $(SPREAD) -o faulthandler_timeout=900 \
		-m "(long or not long) and $(NO_GPU)"

test-trainers: $(STAMP_TRAINERS)
	$(BIN_TRAINERS)/python -m pytest $(SPREAD) tests/packages

$(STAMP_TRAINERS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_TRAINERS)
	$(BIN_TRAINERS)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN_TRAINERS)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[trainers]' hypothesis numpy pytest pytest-xdist
	touch $@

test-gpu:
	@$(ON_GPU) -m "gpu and alone" || failed=1; \
	OMP_NUM_THREADS=1 $(ON_GPU) -n auto --dist worksteal -m "gpu and not alone" || failed=1; \
	exit $${failed:-0}

docs: $(STAMP_DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN_DOCS)/mkdocs build

$(STAMP_DOCS): pyproject.toml
	$(PYTHON) -m venv $(VENV_DOCS)
	$(BIN_DOCS)/python -c '$(EXTRA_DOCS)' > $(VENV_DOCS)/requirements.txt
	$(BIN_DOCS)/python -m pip install --quiet --disable-pip-version-check -r $(VENV_DOCS)/requirements.txt
	touch $@

# `build` makes the wheel from the sdist. It needs an environment without this folder's package.
dist:
	rm -rf dist
	$(PYTHON) -m venv --clear $(VENV_DIST)
	$(BIN_DIST)/python -m pip install --quiet --disable-pip-version-check build $(TORCH)
	$(BIN_DIST)/python -m build --outdir dist
	$(BIN_DIST)/python tests/distributions.py dist

clean:
	rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -not -path './$(VENV_DOCS)/*' -not -path './$(VENV_TRAINERS)/*' -not -path './$(VENV_DIST)/*' -prune -exec rm -rf {} +
