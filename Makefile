PYTHON ?= $(shell command -v python3.11 || command -v python3)
NEW_ENVIRONMENT = @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Weightbeam needs Python 3.11 or later; make PYTHON=…")' && $(PYTHON) -m venv
RUN := .venv/bin
DIST ?= dist
WORKERS ?= $(shell nproc)
# As many processes as cores; each takes the next of a contiguous half, so that what a file makes once is made once.
PYTEST = $(RUN)/python -m pytest -n $(WORKERS) --dist worksteal
unexport PYTHONDONTWRITEBYTECODE # else every process compiles the project and the tests anew

.PHONY: demo check test test-landing test-slow test-nightly test-all mutants durations soak dataflow-dry-run pin-packages pin-images lint format bench bench-full docs dist test-pure clean

demo: .venv/core ## write, convert, restore and check a small FP8 checkpoint
	$(RUN)/python -m examples.demo out/demo

test: .venv/test ## the tests that a person waits for: everything pure, one path of each command, every two things together
	$(PYTEST) -m "not landing and not slow"

test-pure: .venv/test ## tables, formats, plans and their numbers, without commands and clusters: what is tried on macOS, too; SYSTEM=macos takes away what only Linux has
	WEIGHTBEAM_SYSTEM=$(SYSTEM) $(PYTEST) -m "not landing and not slow" tests/model_mappings tests/formats tests/transforms tests/families

test-landing: .venv/test ## the rest but the slow ones: whole commands in many ways, processes, kills, engines
	$(PYTEST) -n $$(($(WORKERS) * 3 / 2)) -m "landing and not slow" # more, since they wait for a third of their time

test-slow: .venv/test ## what takes too long for every change: more processes, kills, bombs and hostile folders, an installation; half an hour
	$(PYTEST) -m slow

test-nightly: .venv/test ## all products where the other targets take pairs, with another seed each time; hours
	WEIGHTBEAM_PRODUCTS=full WEIGHTBEAM_SEED=$${WEIGHTBEAM_SEED:-$$(date +%j)} $(PYTEST)

test-all: .venv/test ## tests of both tiers on Python 3.11, 3.12 and 3.13, those that are installed, each in an environment of its own in .nox
	$(RUN)/nox

durations: .venv/test ## measure what each file of tests takes, for the forecast that a run begins with
	WEIGHTBEAM_DURATIONS=write $(PYTEST) -m "not slow"

check: .venv/test ## within a minute, between two keystrokes: style, types, and the nearest tests of what changed (since main, or BASE=)
	$(RUN)/python tests/check.py

mutants: .venv/test ## a hundred small faults in what must not be wrong, and which test finds each: hours; SEED=1 for others, out/mutants.json is gone on from
	nice $(RUN)/python tests/mutants.py --seed $(or $(SEED),0)

soak: .venv/test ## kill and resume hundreds of conversions, 3,000 schedules of sleeps and takeovers, every field of every config: an hour
	PYTHONPATH=.:tests $(RUN)/python tests/soak.py
	FOLLOW_KILLS=25 $(RUN)/python -m pytest -n 0 tests/pipelines/test_follow.py -k beside_a_run
	LARGE_CHUNKS=1 $(RUN)/python -m pytest -n 0 tests/pipelines/test_memory.py -k larger_than_the_limit

test-engines: .venv/test ## Flink, Spark and Prism as clusters of this machine's own: needs Java, Maven, Go and root, and fetches 450 MB once; ten minutes
	WEIGHTBEAM_ENGINES=all $(RUN)/python -m pytest -n 0 tests/engines

lint: .venv/test ## style, types and the direction of imports
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/pyright
	$(RUN)/lint-imports --no-logo

format: .venv/test ## mend what can be mended
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

bench: .venv/test ## measure what the README claims, one table and a picture: an hour, 25 GB of disk; links and hosts need root's rights, Java and Maven
	PYTHONPATH=.:tests $(RUN)/python -m benchmarks

bench-full: .venv/test ## convert a sparse DeepSeek-V3 at its full size: half an hour, 20 GB of disk
	$(RUN)/python -m benchmarks.full_run --json benchmarks/results.json
	$(RUN)/python -m benchmarks --show

dataflow-dry-run: .venv/test ## submit a small conversion to test servers, and print the Dataflow job
	PYTHONPATH=.:tests $(RUN)/python tests/submission.py

pin-packages: .venv/test ## write the hashes of the image's packages to deploy/requirements.txt, of deploy/constraints.txt
	$(RUN)/python -m deploy.pins packages

pin-images: .venv/core ## add the digests of the base images to deploy/Dockerfile: needs docker and the network
	$(RUN)/python -m deploy.pins images

docs: .venv/docs ## the site, in out/site/html: notebooks are run, and a broken link, a page without a place or a name without a docstring fails
	$(RUN)/python -m deploy.site $(if $(PUBLISH),--publish $(PUBLISH))

.venv/core .venv/test: export PYTHONWARNINGS = ignore # setuptools has thirty lines to say of every editable install

.venv/core: pyproject.toml
	@echo "making .venv: 600 MB, a minute or two"
	$(NEW_ENVIRONMENT) .venv
	$(RUN)/python -m pip install --quiet --upgrade pip
	$(RUN)/python -m pip install --quiet --editable '.[demo]'
	touch $@

.venv/test: .venv/core
	@echo "installing PyTorch, transformers and the linters into .venv: 5 GB, some minutes"
	$(RUN)/python -m pip install --quiet torch==2.13.0
	$(RUN)/python -m pip install --quiet --editable '.[test,models]'
	touch $@

.venv/docs: .venv/test
	$(RUN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

dist: .venv/test ## sdist and wheel in DIST, and what their linters say: twine, check-wheel-contents
	rm -rf $(DIST)
	$(RUN)/python -m build --outdir $(DIST)
	$(RUN)/twine check --strict $(DIST)/*
	$(RUN)/check-wheel-contents $(DIST)/*.whl

clean:
	rm -rf .venv .nox out dist *.egg-info
