# One environment per purpose, made on first use and again when pyproject.toml changes:
#   .venv            the package, and with `make test` its development tools
#   .venv-latest     the same under the newest Python found, with the newest JAX
#   .venv-reference  CPU torch and the PyTorch implementations that fixtures are made with
#   .venv-device     the package with JAX for this machine's NVIDIA GPU
#   .venv-aot        the package with JAX's compiler for CUDA, without a GPU or NVIDIA's libraries (about 180 MB more)
# PYTHON=/path/to/python chooses the interpreter of an environment that does not exist yet.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?=
export PYTHON
VENV ?= .venv
LATEST ?= .venv-latest
REFERENCE ?= .venv-reference
AOT ?= .venv-aot
DEVICE ?= .venv-device
CUDA ?= cuda12
# Where pip finds CPU builds of torch, beside the configured index. On Linux the index's own builds carry CUDA: right, but large.
TORCH_INDEX ?=
PROMPT ?= A baker bakes 12 loaves an hour for 5 hours and sells each for 3 dollars. How much does he earn?
DEMO_FLAGS ?= --max-new-tokens 96
PYTEST_FLAGS ?=
CASES ?=
BENCH_FLAGS ?=
AOT_FLAGS ?=

pip = $(1)/bin/python -m pip install -qq --disable-pip-version-check

# $(call environment,FOLDER,WHICH): a virtual environment there, by the Python that tools/find_python.sh finds for WHICH.
define environment
	if ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
	  python=$$(tools/find_python.sh $(2)); \
	  echo "making $(1) with $$($$python --version) ($$python)"; \
	  $$python -m venv --clear $(1); \
	fi
endef

.PHONY: help demo test test-latest lint reference reference-test goldens drafter-goldens training-goldens bench bench-cycle bench-train bench-device aot clean FORCE

help:
	@echo "make demo         set up, fetch the demo model once, generate from PROMPT=\"...\", show tokens/s with a drafter and without"
	@echo "make test         set up, run the tests            (PYTEST_FLAGS=\"-k name\")"
	@echo "make test-latest  the tests under the newest Python found and the newest JAX"
	@echo "make lint         ruff and the type checker"
	@echo "make reference    make the environment of the PyTorch reference implementations"
	@echo "make reference-test  load what jaxspec exports with speculators, and compare"
	@echo "make goldens      remake the fixtures under tests/goldens with it  (CASES=\"llama gemma3\")"
	@echo "make drafter-goldens  likewise those of the drafters  (DEEPSPEC=clone of deepseek-ai/DeepSpec, CASES=\"dflash zlab\")"
	@echo "make training-goldens  those of the training objectives, for the drafters' fixtures  (likewise)"
	@echo "make bench        decoding speed against transformers + torch  (BENCH_FLAGS=\"--rounds 3\")"
	@echo "make bench-cycle  what a cycle costs besides the models, and its speed against dflash + torch  (BENCH_FLAGS=\"split growth\")"
	@echo "make bench-train  speed and memory of a training step against speculators + torch  (BENCH_FLAGS=\"--methods dflash\")"
	@echo "make bench-device  kernels and whole cycles on this machine's GPU, in 8 minutes at most  (BENCH_FLAGS=\"--only checks kernels\")"
	@echo "make aot          compile kernels and whole programs for GPUs that are not here  (AOT_FLAGS=\"--only kernels\")"
	@echo "make clean        remove the environments and caches in this folder"

$(VENV)/.installed: pyproject.toml
	@$(call environment,$(VENV))
	@echo "installing jaxspec into $(VENV) (about a minute)"
	@$(call pip,$(VENV)) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml
	@$(call environment,$(VENV))
	@echo "installing jaxspec and its development tools into $(VENV) (about a minute)"
	@$(call pip,$(VENV)) -e ".[dev]"
	@touch $(VENV)/.installed $@

# Each time, as newer releases come out without pyproject.toml changing.
$(LATEST)/.installed-dev: pyproject.toml FORCE
	@$(call environment,$(LATEST),newest)
	@echo "installing jaxspec and its development tools into $(LATEST) (about a minute)"
	@$(call pip,$(LATEST)) --upgrade --upgrade-strategy eager -e ".[dev]"
	@touch $@

$(REFERENCE)/.installed: pyproject.toml Makefile
	@$(call environment,$(REFERENCE),3.11)
	@echo "installing torch and the reference implementations into $(REFERENCE) (a few minutes)"
	@$(call pip,$(REFERENCE)) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e ".[reference]"
	@# With their dependencies these would bring CUDA builds of torch and an older transformers.
	@$(call pip,$(REFERENCE)) --no-deps speculators==0.9.0 dflash==0.1.0 hs-connectors==0.9.0
	@touch $@

$(AOT)/.installed: pyproject.toml
	@$(call environment,$(AOT))
	@echo "installing jaxspec and JAX's compiler for CUDA into $(AOT) (a few minutes)"
	@$(call pip,$(AOT)) -e .
	@version=$$($(AOT)/bin/python -c 'import jax; print(jax.__version__)'); \
	  $(call pip,$(AOT)) --no-deps jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version
	@touch $@

demo: $(VENV)/.installed
	@$(VENV)/bin/python tools/fetch_demo.py
	@$(VENV)/bin/python -m jaxspec.generate --stats $(DEMO_FLAGS) "$(PROMPT)"
	@echo "the same text without a drafter:"
	@$(VENV)/bin/python -m jaxspec.generate --stats $(DEMO_FLAGS) --drafter none "$(PROMPT)" > /dev/null

test: $(VENV)/.installed-dev
	@$(VENV)/bin/python -m pytest $(PYTEST_FLAGS)

test-latest: $(LATEST)/.installed-dev
	@$(LATEST)/bin/python -c 'import sys, jax, flax, numpy; print(f"Python {sys.version.split()[0]}, JAX {jax.__version__}, Flax {flax.__version__}, NumPy {numpy.__version__}")'
	@$(LATEST)/bin/python -m pytest $(PYTEST_FLAGS)

lint: $(VENV)/.installed-dev
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/basedpyright

reference: $(REFERENCE)/.installed

reference-test: $(REFERENCE)/.installed
	@HF_HUB_OFFLINE=1 $(REFERENCE)/bin/python tools/check_speculators_export.py

goldens: $(REFERENCE)/.installed
	@$(REFERENCE)/bin/python tools/make_rope_goldens.py
	@$(REFERENCE)/bin/python tools/make_goldens.py $(CASES)

drafter-goldens: $(REFERENCE)/.installed
	@$(REFERENCE)/bin/python tools/make_drafter_goldens.py $(if $(DEEPSPEC),--deepspec "$(DEEPSPEC)") $(CASES)

training-goldens: $(REFERENCE)/.installed
	@$(REFERENCE)/bin/python tools/make_training_goldens.py $(if $(DEEPSPEC),--deepspec "$(DEEPSPEC)") $(CASES)

bench: $(REFERENCE)/.installed
	@$(REFERENCE)/bin/python tools/fetch_demo.py
	@$(REFERENCE)/bin/python tools/bench_decode.py $(BENCH_FLAGS)

bench-cycle: $(REFERENCE)/.installed
	@$(REFERENCE)/bin/python tools/fetch_demo.py
	@$(REFERENCE)/bin/python tools/bench_cycle.py $(BENCH_FLAGS)

# CUDA is jax's extra for the GPU's driver: cuda12 or cuda13.
$(DEVICE)/.installed-$(CUDA): pyproject.toml
	@if ls $(DEVICE)/.installed* 2>/dev/null | grep -qv -- '-$(CUDA)$$'; then rm -rf $(DEVICE); fi
	@$(call environment,$(DEVICE))
	@echo "installing jaxspec with JAX for CUDA into $(DEVICE) (a few minutes)"
	@$(call pip,$(DEVICE)) -e ".[$(CUDA)]"
	@touch $@

bench-device: $(DEVICE)/.installed-$(CUDA)
	@$(DEVICE)/bin/python tools/bench_device.py $(BENCH_FLAGS)

aot: $(AOT)/.installed
	@$(AOT)/bin/python tools/aot.py $(AOT_FLAGS)

bench-train: $(REFERENCE)/.installed
	@HF_HUB_OFFLINE=1 $(REFERENCE)/bin/python tools/bench_train.py $(BENCH_FLAGS)

clean:
	rm -rf $(VENV) $(LATEST) $(REFERENCE) $(AOT) $(DEVICE) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
