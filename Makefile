# make run   sets up everything and opens the app on http://127.0.0.1:7860
# make test  sets up everything, a browser too, and runs lint, types and all tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

.PHONY: run test lint browser clean

run: $(VENV)/.app
	$(BIN)/blr-lab app $(ARGS)

test: $(VENV)/.test browser lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, $$($(PYTHON) -V 2>&1) was found; name another with: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch and torchvision go first, so that pip resolves the large wheels once.
$(VENV)/.app: pyproject.toml | $(VENV)/.python
	$(BIN)/pip install --quiet --disable-pip-version-check "torch>=2.11" "torchvision>=0.26"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.app
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test]"
	@touch $@

# The browser tests drive the system's Chromium.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	echo "Chromium is missing; installing it from the system's packages"; \
	sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	if command -v apt-get >/dev/null; then $$sudo apt-get update -qq && $$sudo apt-get install -y -qq chromium; \
	elif command -v dnf >/dev/null; then $$sudo dnf install -y -q chromium; \
	elif command -v brew >/dev/null; then brew install --cask chromium; \
	else echo "Install Chromium or Google Chrome, then run make test again."; exit 1; fi

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
