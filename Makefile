# make demo   the digits experiment on a fresh machine, from nothing to its table
# make test   the fast tests
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first python on the path that is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
		2> /dev/null && echo $$python && break; done)
# jax needs Python 3.12 since 0.11: where the first python is older, pyenv may hold another.
PYENV := $(HOME)/.pyenv/versions
NEWEST_PYTHON ?= $(shell for python in python3.13 python3.12 python3 \
		$(PYENV)/3.13*/bin/python $(PYENV)/3.12*/bin/python; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' \
		2> /dev/null && echo $$python && break; done)
VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
PREVIOUS := .venv-previous
FLOWER := .venv-flower
# The newest release before the newest minor version of jax.
PREVIOUS_JAX := jax<0.12
WHEEL := build/wheel
WORKERS ?= 2
DEMO_OUT ?= runs/demo
# An accelerator's JAX is installed by hand, so its environment is not one of those below.
ACCELERATOR_PYTHON ?= python
ACCELERATOR_OUT ?= runs/accelerator
NOTEBOOKS := notebooks/one_shot notebooks/your_model notebooks/fine_tuned notebooks/theory

# Kept bytecode: without it each process, of which tests start many, compiles JAX's modules for 4 s.
unexport PYTHONDONTWRITEBYTECODE
# Tests of a file share what they compile: each file goes to one process.
PYTEST := -m pytest -n $(WORKERS) --dist loadfile
FOREIGN := tests/test_foreign.py tests/core/test_compiler.py -m "not slow"
# What the oldest packages are asked: whatever calls JAX for itself, and the commands' packages.
OLD := tests/core tests/fisher tests/layers tests/algorithms/test_battery.py tests/adapters/test_methods.py \
	$(patsubst %,tests/test_%.py,datasets files merging one_device quadratic rounds solvers training tree) \
	$(patsubst %,tests/harness/test_%.py,one_round options) tests/experiments/test_one_shot.py
# Python compiles what is imported at its first import: to compile everything takes as long as to
# install it.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile

help: ## List what make can do
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.base ## Install and run the digits experiment (about two minutes)
	$(VENV)/bin/python -m experiments.one_shot --dataset digits --model mlp --out $(DEMO_OUT) \
		--algorithms fedavg fisher_merge regmean fedlpa fedfisher_diag fedfisher_kfac fedfisher_sequential \
		--calibrate analytic_head ccvr --exchanges 5

test: $(VENV)/.dev ## Run the fast tests and the examples of the documentation
	$(VENV)/bin/python $(PYTEST)

test-long: $(VENV)/.dev ## Run the tests of more than about a second that are not slow
	$(VENV)/bin/python $(PYTEST) -m "long and not slow" tests

test-not-slow: $(VENV)/.dev ## Run both in one go: tests of a file share what they compile
	$(VENV)/bin/python $(PYTEST) -m "not slow"

test-slow: $(VENV)/.dev ## Run every test
	$(VENV)/bin/python $(PYTEST) -m ""

test-oldest: $(OLDEST)/.test ## Run those fast tests on the oldest supported versions that call their packages
	$(OLDEST)/bin/python $(PYTEST) $(OLD)

test-newest: ## Run the fast tests nearest to JAX's inside on its newest version, optimised
	$(call on_newest,$(NEWEST),tests/fisher tests/layers tests/core/test_compat.py)

# The check of all identities takes the longest, and is asked of the newest.
test-foreign: ## Verify compiled programs of other people's networks on the newest two jax
	$(call on_newest,$(NEWEST),$(FOREIGN))
	$(call on_newest,$(PREVIOUS),$(FOREIGN) -k "not the_check")

test-flower: $(FLOWER)/.test ## Run the tests of federated runs on Flower that are not slow, also over real sockets
	$(FLOWER)/bin/python $(PYTEST) -m "not slow" tests/flower tests/flower_loopback fisherjax/flower \
		tests/experiments/test_flower.py

accelerator: ## Measure what is not known yet of one accelerator (eight minutes at most)
	$(ACCELERATOR_PYTHON) -m experiments.benchmark.accelerator --out $(ACCELERATOR_OUT)

lint: $(VENV)/.dev ## Check style and formatting
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

types: $(VENV)/.dev ## Check types of the library, and of a script that uses it
	$(VENV)/bin/basedpyright --pythonpath $(VENV)/bin/python

format: $(VENV)/.dev ## Correct style and formatting where a tool can
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

notebook: $(VENV)/.dev ## Execute the notebooks, after checking them against their sources
	@$(VENV)/bin/python -c 'import sys, jupytext; \
	    cells = lambda path: [(c.cell_type, c.source) for c in jupytext.read(path).cells]; \
	    old = [n for n in sys.argv[1:] if cells(n + ".py") != cells(n + ".ipynb")]; \
	    sys.exit(", ".join(old) + " out of date: make notebook-update" if old else 0)' $(NOTEBOOKS)
	$(VENV)/bin/python -m pytest -n $(WORKERS) --nbmake --nbmake-timeout=600 $(NOTEBOOKS:=.ipynb)

notebook-update: $(VENV)/.dev ## Update the notebooks and their outputs from their sources
	$(VENV)/bin/jupytext --quiet --to ipynb --update $(NOTEBOOKS:=.py)
	$(VENV)/bin/python -m pytest --nbmake --nbmake-timeout=600 --overwrite $(NOTEBOOKS:=.ipynb)

docs: $(VENV)/.dev ## Build the site into build/docs/html; DOCS_ONLINE=1 links other packages too
	rm -rf build/docs
	$(VENV)/bin/python -m sphinx --quiet --fail-on-warning --keep-going --doctree-dir build/docs/doctrees \
		docs build/docs/html

wheel: ## Build the sdist and from it the wheel, which is used in an empty environment
	rm -rf $(WHEEL)
	$(call environment,$(WHEEL)/tools)
	$(WHEEL)/tools/bin/python $(INSTALL) build twine
	$(WHEEL)/tools/bin/python -m build --outdir $(WHEEL) . > $(WHEEL)/build.log
	$(WHEEL)/tools/bin/python -m twine check --strict $(WHEEL)/fisherjax-*
	$(call environment,$(WHEEL)/env)
	$(WHEEL)/env/bin/python $(INSTALL) $(WHEEL)/fisherjax-*.whl
	cd $(WHEEL) && env/bin/python $(CURDIR)/.ci/wheel.py

environments: $(VENV)/.dev $(OLDEST)/.test $(FLOWER)/.test ## Install what every test needs; -j2 side by side
	@[ -z "$(NEWEST_PYTHON)" ] || $(MAKE) --no-print-directory $(PREVIOUS)/.test PYTHON="$(NEWEST_PYTHON)"

clean: ## Remove the environments, caches and build products; results under runs/ stay
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(PREVIOUS) $(FLOWER) .pytest_cache .ruff_cache .hypothesis build dist
	rm -rf docs/get_started/*.ipynb docs/reference/*.rst docs/reference/*/
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp file an environment: nothing is installed again until pyproject.toml changes.
$(VENV)/.base: pyproject.toml
	$(call environment,$(VENV))
	$(VENV)/bin/python $(INSTALL) --editable ".[experiments]"
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(VENV)/bin/python $(INSTALL) --editable ".[dev]"
	@touch $@

$(OLDEST)/.test: pyproject.toml .ci/oldest.txt
	$(call environment,$(OLDEST))
	$(OLDEST)/bin/python $(INSTALL) --constraint .ci/oldest.txt --editable ".[test]"
	@touch $@

$(NEWEST)/.test: pyproject.toml
	$(call environment,$(NEWEST))
	$(NEWEST)/bin/python $(INSTALL) --upgrade --editable ".[test]"
	@touch $@

# Two environments see the packages of another and install only what differs.
$(PREVIOUS)/.test: $(NEWEST)/.test Makefile
	$(call environment_on,$(PREVIOUS),$(NEWEST))
	$(PREVIOUS)/bin/python $(INSTALL) "$(PREVIOUS_JAX)" --editable ".[test]"
	@touch $@

# Flower pins packages that others need newer.
$(FLOWER)/.test: $(VENV)/.dev
	$(call environment_on,$(FLOWER),$(VENV))
	$(FLOWER)/bin/python $(INSTALL) --editable ".[flower,test]"
	@touch $@

# $(call on_newest,ENVIRONMENT,TESTS): fully optimised, in an environment of the newest Python.
define on_newest
@if [ -z "$(NEWEST_PYTHON)" ]; then \
    echo "SKIPPED: no Python 3.12 or later with the venv module, which jax 0.11 and later need." >&2; \
    echo "Install one, or: make $@ NEWEST_PYTHON=/path/to/python3.13" >&2; exit 0; fi; \
$(MAKE) --no-print-directory $(1)/.test PYTHON="$(NEWEST_PYTHON)" && \
$(1)/bin/python -c 'import jax, sys; print("Python", sys.version.split()[0], "jax", jax.__version__)' && \
JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(1)/bin/python $(PYTEST) $(2)
endef

define environment
@if [ -z "$(PYTHON)" ]; then \
	echo "fisherjax needs Python 3.11 to 3.13 with the venv module; found: $$(python3 --version 2>&1)." >&2; \
	echo "Install one (on Debian: python3.11 and python3.11-venv), or: make PYTHON=/path/to/python3.12 ..." >&2; \
	exit 1; fi
$(PYTHON) -m venv $(1)
endef

# $(call environment_on,ENVIRONMENT,BASE): one that falls back to the packages of BASE.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
define environment_on
$(call environment,$(1))
site=$$($(1)/bin/python -c '$(SITE)') && $(2)/bin/python -c '$(SITE)' > "$$site/base.pth"
endef

.PHONY: help demo accelerator environments test test-long test-slow test-oldest test-newest test-foreign test-flower lint types format notebook notebook-update docs wheel clean
