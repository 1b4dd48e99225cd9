PYTHON ?= $(shell command -v python3.11 || command -v python3)
RUN := .venv/bin
WORKERS ?= 2

.PHONY: demo test soak lint format bench clean

demo: .venv/core ## write, convert, restore and check a small FP8 checkpoint
	$(RUN)/python -m examples.demo out/demo

test: .venv/test ## everything that CI runs but the linters
	$(RUN)/python -m pytest -n $(WORKERS)

soak: .venv/test ## kill and resume hundreds of conversions, change every field of every config: half an hour
	PYTHONPATH=.:tests $(RUN)/python tests/soak.py

lint: .venv/test ## style, types and the direction of imports
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/pyright
	$(RUN)/python .ci/import_direction.py

format: .venv/test ## mend what can be mended
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

bench: .venv/test ## measure what the README claims: some minutes, 11 GB of disk
	$(RUN)/python -m benchmarks.bench
	$(RUN)/python -m benchmarks.load
	$(RUN)/python -m benchmarks.kernels

.venv/core: setup.py
	$(PYTHON) -m venv .venv
	$(RUN)/python -m pip install --quiet --upgrade pip
	$(RUN)/python -m pip install --quiet --editable .
	touch $@

.venv/test: .venv/core
	$(RUN)/python -m pip install --quiet torch==2.13.0
	$(RUN)/python -m pip install --quiet --editable '.[test,verify]'
	touch $@

clean:
	rm -rf .venv out *.egg-info
