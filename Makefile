# Every target does its own set-up in .venv; see .ci/setup. PYTHON=python3.12 picks another interpreter.
.PHONY: demo test dev check lint lock
BIN := .venv/bin
PACKAGES := kernels engine agent_tasks lsp daemon

demo:
	@.ci/setup run
	@$(BIN)/quadjet demo

dev:
	@.ci/setup dev

lint: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES:%=-p quadjet.%)
	$(BIN)/mypy tests

check: lint
	$(BIN)/pytest -m "not slow"

# Everything. Tests whose model or GPU is missing are listed as left out at the end.
test: dev
	$(BIN)/pytest
	@.ci/test-extension

# Needs uv. The files name no index: each reader's own is used.
COMPILE := uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-annotate --no-header --quiet
lock:
	$(COMPILE) --group build $(LOCK_OPTIONS) -o requirements.lock
	$(COMPILE) --group dev $(LOCK_OPTIONS) -o requirements-dev.lock
