# Every target sets up what it needs; see README.md.
SHELL := /bin/bash
PY := .venv/bin/python
export CORAL_HOME ?= $(CURDIR)/.coral
# Nothing reaches out to the internet at run time.
export DO_NOT_TRACK := 1
export GX_ANALYTICS_ENABLED := false
export VLLM_NO_USAGE_STATS := 1
export HF_HUB_OFFLINE := 1

.PHONY: run serve test test-engine test-distributed test-browser lint bench clean lock
.DEFAULT_GOAL := help

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 20

.venv/.complete: pyproject.toml docker/requirements.lock .ci/bootstrap.py
	@python3 .ci/bootstrap.py .venv docker/requirements.lock 3.12 3.13

.venv-vllm/.complete: docker/requirements-vllm.lock .ci/bootstrap.py
	@python3 .ci/bootstrap.py .venv-vllm docker/requirements-vllm.lock 3.11

.venv-gateway/.complete: docker/requirements-gateway.lock .ci/bootstrap.py
	@python3 .ci/bootstrap.py .venv-gateway docker/requirements-gateway.lock 3.12 3.13

run: .venv/.complete ## both DAGs to their end on this machine, with local node agents; prints the plan
	@.venv/bin/coral demo

serve: .venv/.complete ## Airflow's UI with both DAGs scheduled
	@.venv/bin/coral serve

test: .venv/.complete ## fast tests: all that needs no extra server
	@$(PY) -m pytest -n 2 --dist loadfile -m "not engine and not distributed and not browser"

test-distributed: .venv/.complete ## the scale-out stack on this machine: Postgres, Redis, S3, two workers, one of them killed
	@$(PY) -m pytest -m distributed -s

test-browser: .venv/.complete ## the page and an approval in Airflow's UI, in Debian's Chromium against coral serve
	@command -v chromium > /dev/null || { echo "test-browser: needs Chromium; on Debian: apt-get install chromium" >&2; exit 1; }
	@$(PY) -m pytest -m browser tests/browser

test-engine: .venv/.complete .venv-vllm/.complete .venv-gateway/.complete ## real vLLM on the CPU and LiteLLM, each in an environment of its own
	@$(PY) -m pytest -m engine

lint: .venv/.complete ## ruff and mypy
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

bench: .venv/.complete ## speed and memory, as ratios within one run
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(PY) $$file || exit 1; done

lock: .venv/.complete ## renew docker/requirements.lock from pyproject.toml (names and versions only)
	@.venv-uv/bin/uv pip compile --universal --python-version 3.12 --no-header --no-annotate --quiet \
	  --extra planner --extra agent --extra aws --extra profiling --extra airflow --extra distributed --extra dev \
	  pyproject.toml -o docker/requirements.lock

clean: ## everything made by the targets above, the data folder included
	@rm -rf .venv .venv-uv .venv-vllm .venv-gateway .coral .mypy_cache .ruff_cache .pytest_cache .hypothesis
