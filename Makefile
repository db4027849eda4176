# `make demo` trains a tiny mixture-of-experts model by DPPO on this machine, no GPU; `make test` runs every check.
PYTHON_IN_VENV := .venv/bin/python
# An environment for CPUs leaves GPUs alone, on a machine that has some: its torch can't use them, and a run says so and ends.
RUN_IN_VENV = $(if $(shell grep -sx kind=cpu .venv/.installed),CUDA_VISIBLE_DEVICES= )$(PYTHON_IN_VENV)
TEST_PROCESSES ?= 2
.DEFAULT_GOAL := help

.PHONY: help setup demo demo-tools demo-distil arena slurm-demo gpu-check test test-second test-slow lint types unit docs mutants failpoints flips chaos soak clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup:  ## the virtual environment .venv (done once); GPU=1: the one for GPUs, which the other targets then use
	@tools/environment/setup.sh $(if $(GPU),gpu)

demo: setup  ## the whole loop on a tiny model: report in runs/demo (also SEED=2, DIRECTORY=..., OVERRIDES="key=value ...")
	@$(RUN_IN_VENV) -m megatron_dppo demo $(if $(SEED),--seed $(SEED)) $(if $(DIRECTORY),--directory $(DIRECTORY)) $(OVERRIDES)

demo-tools: setup  ## it learns to use a calculator over three turns: report in runs/demo-tools (also TASK=python, by a sandbox; and as demo)
	@$(RUN_IN_VENV) -m megatron_dppo demo --task $(or $(TASK),calculator) --directory $(or $(DIRECTORY),runs/demo-tools) $(if $(SEED),--seed $(SEED)) $(OVERRIDES)

demo-distil: setup  ## it learns from a teacher's scores of its own tokens, without rewards: report in runs/demo-distil (also as demo)
	@$(RUN_IN_VENV) -m megatron_dppo demo --task distillation --directory $(or $(DIRECTORY),runs/demo-distil) $(if $(SEED),--seed $(SEED)) $(OVERRIDES)

slurm-demo: setup  ## a real Slurm of four nodes on this machine: the tiny recipe with R3 is submitted, restarted by its time limit, finished
	@$(RUN_IN_VENV) -m examples.tiny_moe.slurm_demo $(if $(DIRECTORY),--directory $(DIRECTORY)) $(OVERRIDES)

arena: setup  ## the rules of papers under their claims, in one process each, ten seeds: findings in runs/arena (also QUICK=1, CLAIM=...)
	@$(RUN_IN_VENV) -m examples.arena.run $(if $(QUICK),--quick) $(if $(CLAIM),--claim $(CLAIM))

gpu-check: setup  ## what to run first on a GPU machine; without one it checks what it can: page in runs/gpu_check (also ONLY=kernels,mask)
	@$(PYTHON_IN_VENV) -m megatron_dppo gpu-check $(if $(ONLY),--only $(ONLY))

# In the order of folders: the longest files, of distributed and integration tests, begin first, and short ones fill the end.
PYTEST = @$(RUN_IN_VENV) -m pytest tests -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
FIRST_TIER = not slow and not second
test: lint types  ## lint, types, the core's tests: unit tests, a loop, a weight update, a resume (ALL=1: every test)
	$(PYTEST) $(if $(ALL),,-m '$(FIRST_TIER)')

test-second: setup  ## the tests that `make test` leaves out, but for the slow ones
	$(PYTEST) -m second

test-slow: setup  ## the slow tests (DAY=0 to 6: a seventh of them)
	$(PYTEST) -m slow $(if $(DAY),--slow-day $(DAY))

unit: setup  ## the fast tests alone
	@$(RUN_IN_VENV) -m pytest tests/unit

docs: setup  ## the documentation as a site in site/, links checked (mkdocs-material, installed apart)
	@[ -d .docs ] || $(PYTHON_IN_VENV) -m pip install -q --no-deps --target .docs -r tools/environment/docs.txt
	@PYTHONPATH=.docs $(PYTHON_IN_VENV) -m mkdocs build --strict

mutants: setup  ## the numerical core changed one operator at a time: prints what no test notices (also MODULES="algorithms/rules.py ...")
	@[ -d .mutants ] || $(PYTHON_IN_VENV) -m pip install -q --no-deps --target .mutants -r tools/environment/mutation.txt
	@PYTHONPATH=.mutants $(PYTHON_IN_VENV) tools/mutants.py --processes $(TEST_PROCESSES) $(MODULES)

failpoints: setup  ## a failure at each durable step of a run, and what it leaves: table in runs/failpoints (also POINTS="checkpoint/*" KINDS=kill,torn)
	@$(RUN_IN_VENV) -m tools.faults.failpoints $(if $(POINTS),--points '$(POINTS)') $(if $(KINDS),--kinds $(KINDS))

chaos: setup  ## random processes of a live run killed every 15 s, then each step derived again: table in runs/chaos (also DURATION=600, seconds)
	@$(RUN_IN_VENV) -m tools.faults.chaos $(if $(DURATION),--duration $(DURATION))

soak: setup  ## 5,000 short steps with kills of servers: memory and descriptors of each process in runs/soak (also STEPS=1000)
	@$(RUN_IN_VENV) -m tools.faults.soak $(if $(STEPS),--steps $(STEPS))

flips: setup  ## 1000 random bits flipped in the files that a run reads: each is caught or harmless (also FLIPS=100)
	@$(RUN_IN_VENV) -m tools.faults.flips $(if $(FLIPS),--flips $(FLIPS))

lint: setup  ## ruff: style and format
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m ruff format --check .

types: setup  ## mypy
	@$(PYTHON_IN_VENV) -m mypy

clean:  ## remove runs, never the environment
	rm -rf runs .mypy_cache .pytest_cache .ruff_cache
