# Two commands matter: `make reproduce` (the main job on the bundled models) and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: reproduce test check format bench docs clean

reproduce: .venv/run-ready
	$(BIN)/visitlens reproduce --out out

test: .venv/test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest

check: test

format: .venv/test-ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/test-ready
	$(BIN)/python benchmarks/attention_rows.py --out benchmarks/results/attention_rows.json
	$(BIN)/python benchmarks/recording.py --out benchmarks/results/recording.json

docs: .venv/test-ready
	$(BIN)/mkdocs build

.venv/run-ready: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(PIP) -e '.[model,images,fast]'
	touch $@

.venv/test-ready: .venv/run-ready
	$(PIP) -e '.[dev]'
	.ci/install-chromium
	touch $@

clean:
	rm -rf .venv out
