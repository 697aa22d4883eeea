# `make install`, `make serve` and `make test` do all the set-up: each builds a virtual environment in .venv first.
PYTHON ?= python3
PORT ?= 8000
VENV := .venv
TYPES := $(wildcard gpumemnet/*/*.pxd)
BUILT_FROM := pyproject.toml constraints.txt hatch_build.py $(TYPES) $(TYPES:.pxd=.py)
PIP := $(VENV)/bin/pip install --progress-bar off --disable-pip-version-check -c constraints.txt

.PHONY: install serve test check docs lint format nightly benchmark clean

install: $(VENV)/.installed-service  ## build .venv with the command gpumemnet and the service

serve: $(VENV)/.installed-service  ## answer predictions on http://127.0.0.1:$(PORT) with the shipped bundle
	$(VENV)/bin/gpumemnet serve --port $(PORT)

test: $(VENV)/.installed-dev  ## run all tests
	$(VENV)/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS)

check: lint  ## style, types, import rule, and the tests of what changed (tests/changed.py says how it picks them)
	@tests=$$($(VENV)/bin/python tests/changed.py); \
	  if [ -n "$$tests" ]; then set -x; $(VENV)/bin/pytest -n 2 --dist loadfile --maxfail 3 $$tests; else echo "no tests to run"; fi

docs: $(VENV)/.installed-dev  ## the documentation site in build/docs; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

lint: $(VENV)/.installed-dev  ## style, types, import rule
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

nightly: $(VENV)/.installed-dev  ## what takes hours: long property tests, thirty minutes of chaos, the evaluation, the benchmarks
	$(VENV)/bin/python benchmarks/nightly.py

benchmark: $(VENV)/.installed-dev  ## measured costs of a prediction, in process and over HTTP
	$(VENV)/bin/python benchmarks/in_process.py
	$(VENV)/bin/python benchmarks/http_latency.py

clean:
	rm -rf gpumemnet/*/*.so gpumemnet/*/*.pyd gpumemnet/compiled_from.*.json $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; name a newer one:  make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "creating a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-service: $(VENV)/bin/python $(BUILT_FROM)
	@echo "installing what the service needs into $(VENV); this is done once"
	$(PIP) --editable '.[service]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python $(BUILT_FROM)
	@echo "installing all extras into $(VENV), torch among them; this is done once and takes minutes"
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.installed-service
