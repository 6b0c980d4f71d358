# Everything stands on .venv, made once from the constraints file that CI uses too.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.PHONY: train test bench lint clean

train: $(VENV)/ready
	$(RUN)/penstock train --ranks 4 --compare

test: $(VENV)/ready lint
	$(RUN)/python -m pytest -n 2 --no-loadscope-reorder

lint: $(VENV)/ready
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

bench: $(VENV)/ready
	$(RUN)/python benchmarks/vs_torch.py

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mlp,transformers,png,studio,tensorboard,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis runs
