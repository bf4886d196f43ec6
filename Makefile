# Everything lives in .venv, made once; stamps in it say what is installed.
#
#   make demo [MODEL=...]   a model from its checkpoint to an answer (a name that tools/fetch_models.py knows, a path, a Hub id)
#   make test               the test suite       make check    ruff, mypy
#   make bench [PEERS=1]    prefill and decode, measured separately, in ours and in JAX; with PEERS=1 other runtimes
#                           are installed into build/peers/ and measured beside them (BENCH_ARGS="--quick", …)
#   make agreement          next-token probabilities of the artifact and of llama.cpp (installed too) on the same GGUF file;
#                           with FLOAT32=1 neither rounds activations (needs OpenBLAS and pkg-config)
#   make bench-1b           export and speed of a random model of a billion parameters
#   make clean              remove .venv, caches and build outputs; models/ and artifacts/ stay
#
# With uv:  make PIP="uv pip" demo

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    ?= $(BIN)/python -m pip
MODEL  ?= smollm2-135m-instruct
PYTEST_ARGS ?=
BENCH_ARGS ?=
PEERS ?=

# What `uv pip` installs into, whatever environment is active.
export VIRTUAL_ENV := $(abspath $(VENV))

.PHONY: help demo test check bench agreement bench-1b clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#  *make /make /p' Makefile

demo: $(VENV)/.export
	$(BIN)/python tools/demo.py "$(MODEL)"

test: $(VENV)/.dev
	$(BIN)/python tools/fetch_models.py smollm2-135m-instruct gemma-3-270m
	$(BIN)/pytest $(PYTEST_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python tools/demo.py "$(MODEL)" --no-answer
	PYTHONPATH=tools $(BIN)/python -m bench "$(MODEL)" $(if $(PEERS),--peers) $(BENCH_ARGS)

agreement: $(VENV)/.bench
	$(BIN)/python tools/demo.py "$(MODEL)" --no-answer
	PYTHONPATH=tools $(BIN)/python -m bench.agreement "$(MODEL)" $(if $(FLOAT32),--float32)

# What random weights say means nothing, so nothing is verified, and the accuracy level is given instead of measured.
bench-1b: $(VENV)/.bench
	$(BIN)/python tools/bench/random_llama.py build/random-llama-1b
	test -e artifacts/random-llama-1b/manifest.json || $(BIN)/diptych export build/random-llama-1b \
	    -o artifacts/random-llama-1b --quantize int4 --no-verify --accuracy-level 4
	PYTHONPATH=tools $(BIN)/python -m bench build/random-llama-1b --engines= $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, $(PYTHON) is %d.%d; try: make PYTHON=python3.12" % v[:2])'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.export: pyproject.toml | $(VENV)/.created
	$(PIP) install --quiet --editable ".[export]"
	@touch $@

$(VENV)/.bench: pyproject.toml | $(VENV)/.created
	$(PIP) install --quiet --editable ".[export,bench]"
	@touch $(VENV)/.export $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.created
	$(PIP) install --quiet --editable ".[export,dev]"
	@touch $(VENV)/.export $@
