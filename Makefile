# Two commands do everything on a fresh Debian or Ubuntu machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
# Some images set it. The tests start hundreds of short processes, each of which would compile the package for itself, and
# pytest's workers all test files.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-fast test-packages cuda-emulated cuda-waits check docs reference format benchmarks parity reshape optimizers chaos-checkpoint chaos-slurm interruptions fuzz fake-cluster fake-memory fake-memory-adapters oldest-torch gpu-check gpu-check-cpu gpu-results clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 26

setup: $(STAMP) ## the environment in .venv, nothing else

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "clustertrain needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "no venv module: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup ## the main job on this machine: train, be preempted, requeue, resume, finish, report
	@CLUSTERTRAIN_HOME="$(CURDIR)/.demo" $(BIN)/clustertrain demo

# Every worker imports the test files of the folders. Those that are missing have no quick tests (tests/conftest.py).
FAST := -n auto --maxprocesses 8 -m 'not slurm and not ranks and not gpu and not long' \
  tests/unit tests/harness tests/cuda_emulation
# More at once would slow each other down on two cores. Each test goes to whichever worker is free: tests/conftest.py.
SLOW = -n 2 --dist loadgroup -m '(ranks or long) and not slurm and not gpu and not emulated $(TIER)'
# Ranks on few cores wake each other at every collective, and by default the kernel switches to the woken one at once.
# Without that, four ranks take a fifth less time. A container may refuse it.
PATIENTLY = nice -n 19 $(shell chrt --batch 0 true 2>/dev/null && echo chrt --batch 0)
# These share one Slurm cluster, or one GPU, and leave a core idle almost half of the time.
ALONE = -m '(slurm or gpu) $(TIER)' tests/slurm tests/gpu
# What covers the paths that only a GPU takes; `make test-all` adds some tests of ranks, `make cuda-emulated` all.
EMULATED = -n 2 --dist loadgroup --device cuda -m '(emulated and not long or ranks and not emulated) $(TIER)' \
  tests/cuda_emulation $(ON_EMULATED)
# A shell starts what it runs in the background with SIGINT ignored.
BESIDE := env --default-signal=INT,QUIT

test: setup test-packages ## every kind of test, those on a real Slurm included; the goal is 20 minutes on two cores
test: TIER = and not extended

test-all: setup test-packages ## every test; an hour. CI runs these
test-all: ON_EMULATED = tests/ranks/test_groups.py tests/ranks/test_stop.py tests/ranks/test_stability.py

test test-all:
	@$(PYTEST) $(FAST); fast=$$?; \
	  log=$$(mktemp); $(BESIDE) $(PYTEST) $(ALONE) >"$$log" 2>&1 & beside=$$!; trap "kill $$beside" INT TERM; \
	  $(PATIENTLY) $(PYTEST) $(SLOW); slow=$$?; $(PATIENTLY) $(PYTEST) $(EMULATED); emulated=$$?; \
	  wait $$beside; alone=$$?; cat "$$log"; rm "$$log"; \
	  exit $$((fast + slow + emulated + alone))

test-fast: setup ## the quick tests: no cluster, no ranks, nothing that takes long
	$(PYTEST) $(FAST)

test-packages:
	@slurm/install-packages || test $$? -eq 77

check: setup ## lint, format, types, layers, shell scripts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	BIN=$(BIN) tests/shellcheck

reference: setup ## the pages of docs/reference that are generated from the code
	$(BIN)/python -m docs.generate

cuda-emulated: setup ## the ranks' tests on an emulated CUDA device
	@$(PATIENTLY) $(PYTEST) --device cuda -n 2 --dist loadgroup -m '(ranks or emulated) and not slurm and not gpu'

cuda-waits: setup ## how often each layout waits for the GPU; writes docs/reference/cuda-waits.md
	$(BIN)/python -m tests.cuda_emulation.waits

docs: setup ## the documentation site, into site/; fails on a warning
	$(BIN)/zensical build --strict

format: setup ## rewrite the sources the way `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: setup ## speed against peers; writes benchmarks/results/
	$(BIN)/python -m benchmarks

parity: setup ## every layout against one process, the whole table; writes benchmarks/results/parity.json
	$(BIN)/python -m tests.harness.parity

reshape: setup ## what each layout saves, loaded by each, the whole table; writes benchmarks/results/reshape.json
	$(BIN)/python -m tests.harness.reshape

optimizers: setup ## every optimizer under every layout against one process; writes benchmarks/results/optimizers.json
	$(BIN)/python -m tests.harness.optimizers

chaos-checkpoint: setup ## 100 short runs to which things happen, each brought to its end; CHAOS='--seed S --rounds N'
	$(BIN)/python -m tests.harness.chaos $(CHAOS)

chaos-slurm: setup test-packages ## a storm of 100 faults on runs of the Slurm testbed, as root; CHAOS='--seed S --rounds N --round K'
	$(BIN)/python -m tests.harness.chaos_slurm $(CHAOS)

interruptions: setup test-packages ## programs of other frameworks, interrupted, beside what each framework does alone; INTERRUPTIONS='--seed S'
	$(BIN)/python -m tests.harness.interruptions $(INTERRUPTIONS)

fuzz: setup ## 10,000 hostile inputs for every command, recipe and file of a run; FUZZ='--inputs N --seed S --class NAME'
	$(BIN)/python -m tests.harness.fuzz $(FUZZ)

fake-cluster: setup ## one step of the presets' layouts on 16 to 512 fake ranks; FAKE='--all' for every layout (days)
	$(BIN)/python -m tests.harness.fake_cluster layouts $(FAKE)

fake-memory: setup ## the plan's memory against torch's memory tracker, 310 jobs; writes benchmarks/results/fake_memory.json
	$(BIN)/python -m tests.harness.fake_cluster memory $(FAKE)

oldest-torch: setup ## the hooks' tests in an environment with torch 2.6, the oldest that they support; downloads 3 GB
	@test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
	  torch==2.6.0 numpy transformers==4.51.3 accelerate==1.6.0 lightning==2.5.1
	CLUSTERTRAIN_TEST_RANKS_PYTHON=$(CURDIR)/.venv-oldest/bin/python $(PYTEST) -n 2 tests/ranks/test_frameworks.py

fake-memory-adapters: setup ## the same for full, LoRA and QLoRA fine-tunes, 51 jobs; writes benchmarks/results/fake_memory_adapters.json
	$(BIN)/python -m tests.harness.fake_cluster adapters $(FAKE)

gpu-check: setup ## all that waits for a GPU, in at most 15 minutes; leaves a folder of evidence. GPU_CHECK='--out FOLDER'
	$(BIN)/python -m benchmarks.gpu_check $(GPU_CHECK)

gpu-check-cpu: setup ## a rehearsal of gpu-check, tiny, on the CPU
	$(BIN)/python -m benchmarks.gpu_check --device cpu $(GPU_CHECK)

gpu-results: setup ## verify EVIDENCE=folder of a gpu-check; bring its results into a cluster profile and the docs
	$(BIN)/python -m benchmarks.gpu_check.results $(EVIDENCE) $(GPU_RESULTS)

clean: ## remove the environment and the demo's runs
	rm -rf $(VENV) .venv-oldest .demo
