# On a fresh machine `make demo` and `make test` are all the set-up there is.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test check format lint types test-fast test-oldest picture decode figures clean

demo: $(VENV)/ready ## what kvsketch does, on a small model, side by side
	$(BIN)/kvsketch demo

test: $(VENV)/ready ## all tests
	$(PYTEST)

check: format lint types test-fast ## what every commit must pass

format: $(VENV)/ready
	$(BIN)/ruff format --check src tests benchmarks

lint: $(VENV)/ready
	$(BIN)/ruff check src tests benchmarks

types: $(VENV)/ready
	$(BIN)/mypy

test-fast: $(VENV)/ready
	$(PYTEST) -m "not slow"

test-oldest: ## all tests on the oldest supported transformers
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

picture: $(VENV)/ready ## the picture of the README: memory while 200,000 tokens are read
	$(BIN)/python benchmarks/long_prompt.py
	$(BIN)/python benchmarks/figures.py

decode: $(VENV)/ready ## the number of the README: decode speed beside stock
	$(BIN)/python benchmarks/decode.py --tokens 32768 --kv-heads 8
	$(BIN)/python benchmarks/figures.py

figures: $(VENV)/ready ## draw docs/figures from the rows in docs/results
	$(BIN)/python benchmarks/figures.py

$(VENV)/ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-oldest .pytest_cache .mypy_cache .ruff_cache
