# Two commands matter: `make reproduce` (the main job on the bundled models) and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: reproduce test check fuzz format bench bench-gpu docs release-check clean

reproduce: .venv/run-ready
	$(BIN)/visitlens reproduce --out out

test: .venv/test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

check: test

# Changed HDF5 structures, each opened in a process of its own: minutes.
fuzz: .venv/test-ready
	$(BIN)/python -m pytest -q -s tests/hooks/recording/test_mutations.py --mutations 2000

format: .venv/test-ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/test-ready
	for name in attention_rows grouped_experts recording storage crash scale ablation attribution training scaling peers interventions dashboard; do \
	  $(BIN)/python benchmarks/$$name.py --out benchmarks/results/$$name.json || exit 1; \
	done

bench-gpu: .venv/test-ready
	$(BIN)/python benchmarks/gpu.py --out benchmarks/results/gpu.json

release-check: .venv/test-ready
	.ci/release-check

docs: .venv/test-ready
	$(BIN)/mkdocs build

.venv/run-ready: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) -e '.[model,images,fast,app]'
	touch $@

.venv/test-ready: .venv/run-ready
	$(PIP) -e '.[dev]'
	.ci/install-chromium
	touch $@

clean:
	rm -rf .venv out
