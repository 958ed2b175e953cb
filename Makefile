# Two commands do everything on a fresh machine with Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

BROWSER := $(VENV)/.browser

.PHONY: demo test lint types golden docs clean

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or later is needed: make PYTHON=python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy hatchling
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/whynan demo

# A Chromium for the tests of the report page: one that is there, playwright's, or Debian's; without any those tests are skipped.
$(BROWSER): $(STAMP)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || $(BIN)/playwright install chromium >/dev/null 2>&1 \
	  || { command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
	  || echo "no Chromium could be installed: the tests of the report page will be skipped"
	@touch $(BROWSER)

test: $(STAMP) $(BROWSER)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

golden: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/update_golden.py

docs: $(STAMP)
	$(BIN)/python docs/build.py build/docs

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
