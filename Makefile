# Every command makes its own virtual environment in .venv on first use; nothing else has to be installed.

PYTHON ?= python3
SEED ?= 0
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test check clean

help:
	@echo "make demo    train a small agent with RSPO on the household environment and show what it learned (SEED=0)"
	@echo "make test    run the whole test suite"
	@echo "make check   lint, types, and the ahead-of-time compile check of all Triton kernels"

$(READY): setup.py requirements/dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -r requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps -e .
	touch $@

demo: $(READY)
	$(BIN)/python -m rspo.demo --out runs/demo --seed $(SEED)

# One thread a worker: the tests' tensors are small, and idle threads that spin slow the other workers down.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m rspo_kernels.compile_check --compare bench/results/ahead-of-time/compile.json

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
