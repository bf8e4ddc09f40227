# Everything from a fresh clone with only Python 3.11 (and a C++ compiler for --compile) present.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

# Compiled modules are kept: tests start many interpreters, and hundreds of files are read by each.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-all test-versions test-oldest test-newest test-npu test-xfuser check clean

setup: $(VENV)/.run

# The main job on this machine: videos of the trained demo checkpoint, two processes each.
demo: $(VENV)/.run
	$(BIN)/python tools/run_demo.py

# On each core; tensors are small, and threads would wait for each other.
WORKERS := -n auto --dist loadgroup --no-loadscope-reorder
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS)

test: $(VENV)/.dev
	$(PYTEST) -m "not slow" $(PYTEST_FLAGS)

# Stopped and started again, it goes on where it was.
test-all: $(VENV)/.dev
	$(PYTEST) -p tests.resume -m "not alone" $(PYTEST_FLAGS)
	$(BIN)/python -m pytest -p tests.resume -m alone $(PYTEST_FLAGS)

# With the oldest and the newest packages of the declared ranges, each in an environment of its own.
test-versions: test-oldest test-newest
test-oldest: OLDEST := -e 's/^([A-Za-z0-9_-]+)>=([0-9.]+)[^ \#]*/\1==\2/'
test-oldest test-newest: ENVIRONMENT = $(VENV)/versions/$(@:test-%=%)
test-oldest test-newest:
	$(PYTHON) -m venv $(ENVIRONMENT)
	sed -E -e '' $(OLDEST) requirements.txt requirements-serve.txt requirements-store.txt requirements-power.txt \
		requirements-dev.txt > $(ENVIRONMENT)/requirements.txt
	$(ENVIRONMENT)/bin/pip install --quiet --upgrade -r $(ENVIRONMENT)/requirements.txt
	OMP_NUM_THREADS=1 $(ENVIRONMENT)/bin/python -m pytest $(WORKERS) -m "not slow" $(PYTEST_FLAGS)

# The Ascend code, with the real mindiesd, on a CPU that stands in for the NPU.
test-npu: $(VENV)/.dev $(VENV)/.npu_sim
	MINDIE_LOG_TO_FILE=false MINDIE_LOG_TO_STDOUT=false OMP_NUM_THREADS=1 \
	PYTHONPATH=$(CURDIR)/tests/npu_sim/stand_in:$(CURDIR)/$(VENV)/npu_sim \
	$(BIN)/python -m pytest $(WORKERS) -m "not slow" tests/npu_sim $(PYTEST_FLAGS)

# The attention kernels of xfuser, the real one, as far as they compute on a CPU.
test-xfuser: $(VENV)/.dev $(VENV)/.xfuser
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/tests/xfuser/rig:$(CURDIR)/$(VENV)/xfuser \
	$(BIN)/python -m pytest tests/xfuser $(PYTEST_FLAGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: its exact version decides which of its builds the rest is resolved with.
$(VENV)/.run: requirements.txt constraints.txt pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.run
	$(BIN)/python -m pip install --quiet -c constraints.txt -r requirements-dev.txt
	touch $@

# Without what they depend on: torch-npu itself needs CANN, the NPU's own software.
$(VENV)/.npu_sim: tests/npu_sim/requirements.txt | $(VENV)/bin/python
	rm -rf $(VENV)/npu_sim
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/npu_sim -r $<
	touch $@

# Without what they depend on: PyTorch is here, and the rest is not imported.
$(VENV)/.xfuser: tests/xfuser/requirements.txt | $(VENV)/bin/python
	rm -rf $(VENV)/xfuser
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/xfuser -r $<
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
