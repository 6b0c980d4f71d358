# Everything stands on .venv, made once from the constraints file that CI uses too.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
PYTEST := $(RUN)/python -m pytest
# Tests start hundreds of interpreters, which need not compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup train quick test default-tests slow kernels gpu neighbours nccl docs dist matrix lint bench rooms clean

setup: $(VENV)/ready

train: $(VENV)/ready
	$(RUN)/penstock train --ranks 4 --plan auto --compare

# What starts no process and takes less than a quarter of a second, and one pipeline on two ranks: half a minute.
quick: $(VENV)/ready
	$(PYTEST) -n 2 --dist loadfile --hypothesis-profile=quick -m "smoke or not (ranks or fresh or slow or costly or neighbours or nccl)"

# Every promise, on its cheapest case. `make lint` takes one processor, so tests run at the same time.
test: $(VENV)/ready
	$(MAKE) -j 2 lint default-tests

default-tests: $(VENV)/ready
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder -m "not (slow or neighbours or nccl)"

# The other cases: larger models and meshes, more ways to start, to fail and to end, thousands of random tables and files.
slow: $(VENV)/ready
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder -m "slow and not (neighbours or nccl)"

# The bits again, by the kernels of smaller processors.
kernels: $(VENV)/ready
	ATEN_CPU_CAPABILITY=default $(PYTEST) -n 2 --dist loadfile -m kernels
	ATEN_CPU_CAPABILITY=avx2 $(PYTEST) -n 2 --dist loadfile -m kernels

# On a machine with a GPU, by the Python whose torch knows it; the parts, each under ten minutes, the most important first.
GPU_PYTHON ?= python3
GPU_PARTS := lines_on_device bits_on_device faults_on_device waits mixed_precision_on_device state_on_device
gpu: $(GPU_PARTS:%=gpu-%) gpu-speed

gpu-speed:
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) benchmarks/gpu.py
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) benchmarks/gpu.py --width 4096 --part step

gpu-%:
	PYTHONPATH=$(CURDIR) CUBLAS_WORKSPACE_CONFIG=:4096:8 $(GPU_PYTHON) -m pytest -m gpu -s --timeout 300 tests/gpu/test_$*.py

# The examples with transformers, peft, Lightning, Accelerate and Ray, which they need and nothing else does.
neighbours: $(VENV)/neighbours
	$(PYTEST) -m neighbours

$(VENV)/neighbours: $(VENV)/ready
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -C editable_mode=compat -e '.[neighbours]'
	touch $@

# The site, build/site/html/index.html: pages of docs/ and what is made from the code. A warning or a dead link fails.
docs: $(VENV)/docs
	$(RUN)/python tools/site/build.py

$(VENV)/docs: $(VENV)/ready
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -C editable_mode=compat -e '.[docs]'
	touch $@

# The wheel and the source distribution, build/dist: their contents, and that they work where nothing else is installed.
dist: $(VENV)/ready
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -C editable_mode=compat -e '.[dist]'
	$(RUN)/python tools/dist.py

# Schedules, models, meshes and faults over emulated NCCL, on the CPU: tests/emulated_nccl.py. `ahead` connects
# at first use as `lazy` does, and takes every test; `lazy` those in which the host waits, `eager` those that make groups.
NCCL_LAZY := faults mistakes rollback
NCCL_EAGER := faults pipeline
NCCL_AHEAD := changing_messages faults model batch training generation mistakes pipeline rollback
NCCL_TESTS_lazy := $(NCCL_LAZY:%=tests/engine/test_%.py) tests/batch/test_agreement.py
NCCL_TESTS_eager := $(NCCL_EAGER:%=tests/engine/test_%.py) tests/mesh/test_mesh.py::test_it_has_the_gradients_of_one_process
NCCL_TESTS_ahead := $(NCCL_AHEAD:%=tests/engine/test_%.py) tests/batch/test_agreement.py tests/mesh/test_mesh.py tests/stage
nccl: $(VENV)/ready nccl-lazy nccl-eager nccl-ahead
	$(PYTEST) -n 2 --dist load -m nccl tests/nccl

# Not what a system refuses to lines in memory only, nor measured memory: a device that lags frees it late.
NCCL_NOT := (system_refuses and not open) or measured_memory
nccl-%:
	$(PYTEST) -n 2 --dist loadfile --over-nccl $* -m "ranks and not fresh" -k "not ($(NCCL_NOT))" $(NCCL_TESTS_$*)

# Every supported release of torch and Python: docs/reference/releases.md. `make matrix MATRIX="--torch 2.15.0"` refreshes a part of it.
matrix: $(VENV)/ready
	$(RUN)/python tools/matrix.py $(MATRIX)

lint: $(VENV)/ready
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

bench: $(VENV)/ready
	$(RUN)/python benchmarks/vs_torch.py

rooms: $(VENV)/ready
	$(RUN)/python tests/house/rooms.py

# `compat` puts this folder on the path: a script beside a clone named penstock finds the package, not the clone.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -C editable_mode=compat -e '.[mlp,transformers,png,studio,tensorboard,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis runs
