# make demo   set up .venv and run the main job: compare every method, print the table, write report.html
# make test   set up .venv and pass the tests, but those that are marked as slow
# make test-all  pass the slow tests, too, and three times as many examples of each law: for every night
# make check  what continuous integration runs: lint, types, tests, wheel
# make bench  measure every speed and write docs/results/speed.md (minutes; on a machine that does nothing else)
# make suite  run every method on zoo models and clusters and write docs/results/suite.md, and the table of
#             docs/methods.md (more than an hour; goes on where it was stopped)
# make learning  train policies on the tasks of the papers and write docs/results/learning.md (hours; goes on where it
#             was stopped)
# make net    draw models from a grammar, run each under every family of strategies beside the plain model, and write
#             docs/results/wide_net.md (a night)
# make oracle compare the simulator with SimGrid, too (Debian's python3-simgrid; asks for root)

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all lint types wheel check bench suite learning net oracle clean
.DEFAULT_GOAL := demo

.venv/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is older: run make PYTHON=python3.11 (or newer)." >&2; exit 1; }
	@echo "setting up .venv (once; torch is large) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) -e .
	@touch $@

.venv/.test: .venv/.runtime
	@echo "adding the test tools to .venv (once) ..."
	@$(PIP) -e '.[test,dev]'
	@touch $@

demo: .venv/.runtime
	$(BIN)/placement compare nasnet_large --cluster 4xV100-pcie --methods +pretrained,hierarchical --seed 0 --html report.html

test: .venv/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-all: .venv/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m '' --hypothesis-profile night

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.test
	$(BIN)/mypy

wheel: .venv/.test
	$(BIN)/python -m build --quiet --wheel --outdir dist

check: lint types test wheel

bench: .venv/.runtime
	$(BIN)/python benchmarks/speed.py --seed 0

suite: .venv/.test
	$(BIN)/python benchmarks/suite.py --seed 0

learning: .venv/.test
	$(BIN)/python benchmarks/learning.py --seed 0

net: .venv/.test
	PYTHONPATH=. $(BIN)/python benchmarks/wide_net.py --alone --out docs/results
	PYTHONPATH=. $(BIN)/python benchmarks/wide_net.py --seed 0 --models 500 --out docs/results
	PYTHONPATH=. $(BIN)/python benchmarks/wide_net.py --transformers --out docs/results

oracle: .venv/.test
	apt-get update && apt-get install -y python3-simgrid
	/usr/bin/python3 -c 'import simgrid'
	$(BIN)/python -m pytest tests/env/test_simgrid.py -rs

clean:
	rm -rf .venv build dist *.egg-info report.html .mypy_cache .ruff_cache .pytest_cache .hypothesis
