# `make train` and `make test` set up their environment; later calls start at once.
#
#   make train CONFIG=configs/tiny_dp.toml ARGS="--set model.layers=4"
#   make train-pod RESUME=runs/tiny
#   make test JOBS=8 ARGS="tests/core/pjit -k donate"

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV := .venv
PYTHON_WANTED := 3.12
CONSTRAINTS :=
EXTRAS := train
# gpu_target is the extra gpu-target: names of stamps have hyphens for commas.
TEST_EXTRAS := train,legacy,dev,tpu,gpu_target
CONFIG := configs/tiny.toml
# A run to resume, in place of a new one with the settings of CONFIG.
RESUME :=
PROCESSES := 4
DEVICES := 2
JOBS := 2
ARGS :=
# The release that `make check-jax` tries: the oldest for functions of jax.jit.
JAX := 0.10.2
# The benchmarks of `make bench`; `auto` runs for an hour; `advice` and `resharding` time no code.
BENCHMARKS = $(filter-out advice auto resharding,$(patsubst benchmarks/%.py,%,$(sort $(wildcard benchmarks/[a-z]*.py))))
growth_benchmarks := assembly eager dispatch first_call memory startup reports

comma := ,
python := $(VENV)/bin/python
# Each of some hundred processes would compile every module again (empty means: write bytecode).
export PYTHONDONTWRITEBYTECODE :=
# One stamp for each set of extras: `make train` needs a quarter of the packages of the tests.
installed := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
documenting := $(VENV)/.installed-docs-$(subst $(comma),-,$(TEST_EXTRAS))
developing := $(VENV)/.installed-$(subst $(comma),-,$(TEST_EXTRAS))
install = $(python) -m pip install --quiet --disable-pip-version-check \
	$(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable
train = $(python) -m xlashard train $(if $(RESUME),--resume $(RESUME),--config $(CONFIG)) $(ARGS)
# The banner about another site generator does not concern this site.
mkdocs := NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 $(python) -m mkdocs
pytest := $(python) -m pytest -n $(JOBS) --dist worksteal
# Requirements of the package itself, without comments.
needed = $(shell sed -n '/^dependencies = \[/,/^\]/s/^ *"\([^"]*\)",/\1/p' pyproject.toml)
oldest := VENV=.venv-oldest PYTHON_WANTED='3.12 exactly' CONSTRAINTS=.ci/oldest.txt

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' \
		| column -t -s '|'

.PHONY: train
train: $(installed) ## Run the main job (CONFIG=configs/tiny.toml, ARGS="--set KEY=VALUE")
	$(train)

.PHONY: train-pod
train-pod: $(installed) ## The same on a pod of PROCESSES=4 with DEVICES=2 each (RESUME=runs/tiny)
	$(python) -m xlashard pod -n $(PROCESSES) -d $(DEVICES) -- $(train)

# The tests of HTML pages drive a real browser; this is instant if one is installed.
.PHONY: browser
browser:
	@.ci/get-browser

.PHONY: test
test: $(developing) browser ## Run the tests of every room, or those of ARGS (JOBS=2 processes)
	$(pytest) $(or $(ARGS),-m 'not integration')

.PHONY: test-integration
test-integration: $(developing) browser ## Run whole programs and pods: training runs, documents, examples
	$(pytest) -m integration $(ARGS)

.PHONY: stress-train
stress-train: $(developing) ## Kill, stop, cut and launch the main job twice (FAULTS=200 SEED=1)
	$(python) -m tests.train.stress --faults $(or $(FAULTS),200) --seed $(or $(SEED),1)

.PHONY: test-pure
test-pure: $(developing) ## Run the tests of the pure ring as if JAX were not installed
	XLASHARD_TEST_WITHOUT_JAX=1 $(python) -m pytest -m without_jax $(ARGS)

.PHONY: test-one-device
test-one-device: $(developing) ## Run fast tests of arrays and programs on one device
	XLASHARD_TEST_DEVICES=1 $(pytest) -m 'not slow and not integration and not without_jax' \
		$(or $(ARGS),tests/core tests/_jax tests/errors tests/hlo tests/numpy tests/train/checkpoint)

.PHONY: test-gspmd
test-gspmd: $(developing) browser ## Run the tests that depend on the partitioner under GSPMD
	XLASHARD_PARTITIONER=gspmd $(pytest) -m 'partitioner and not integration' $(ARGS)

.PHONY: test-oldest
test-oldest: ## Run fast tests that depend on JAX's version, and the libraries, with the oldest versions
	$(MAKE) --no-print-directory test $(oldest) ARGS="-m 'jax_version and not slow and not integration' $(ARGS)"
	$(MAKE) --no-print-directory test $(oldest) ARGS="-m integration tests/core/pjit/test_libraries.py"

.PHONY: environment environments
environment: $(developing)
environments: .venv-jax-$(JAX)/.installed .venv-launchers/.installed ## Make those that `.ci/run` needs
	$(MAKE) --no-print-directory environment $(oldest)

# The parsers that read our command lines and task of SkyPilot and xpk. These pin versions of Python
# and of hundreds of packages: where they can't be installed, the tests with them are skipped.
.venv-launchers/.installed:
	@interpreter=$$(.ci/find-python $(PYTHON_WANTED)); $$interpreter -m venv --clear .venv-launchers
	@.venv-launchers/bin/python -m pip install --quiet --disable-pip-version-check \
		'skypilot>=0.14.1' 'xpk>=1.16' || echo 'SkyPilot and xpk could not be installed'
	@touch $@

.PHONY: test-all
test-all: ## Run every test on everything: both partitioners, the oldest versions, PyTorch (an hour)
	$(MAKE) --no-print-directory test lint ARGS="--full-size --random-programs 200 $(ARGS)"
	XLASHARD_PARTITIONER=gspmd $(pytest) $(ARGS)
	$(MAKE) --no-print-directory test $(oldest) ARGS="-m '' $(ARGS)"
	$(MAKE) --no-print-directory test-torch

.PHONY: test-torch
test-torch: ## Run the tests with PyTorch, which takes 6 GB on Linux
	$(MAKE) --no-print-directory test VENV=.venv-torch TEST_EXTRAS=dev,torch JOBS=0 \
		ARGS="tests/ecosystem/test_torch.py $(ARGS)"

.PHONY: check
check: $(developing) ## Run ruff and the fast tests
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(pytest) -m 'not slow and not integration' $(ARGS)

.PHONY: goldens
goldens: $(developing) ## Rewrite all golden files, or those of ARGS=tests/FOLDER
	$(python) -m pytest -q --update-goldens $(or $(ARGS),tests)
	git diff --stat -- tests docs

.PHONY: names
names: $(developing) ## Rewrite xlashard/_jax/names.toml, the private names of JAX that are in use
	$(python) -m tests.private_names --write

.PHONY: house
house: $(developing) ## Print the budgets of tests/budgets.toml, and files and names by floor
	@JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 $(python) -m tests.house

# A release of JAX by itself, with what the package and its tests need, and without the libraries,
# which may refuse it.
.PHONY: check-jax
check-jax: .venv-jax-$(JAX)/.installed ## Try another release of JAX: private names, features, tests (JAX=0.10.2)
	@python=.venv-jax-$(JAX)/bin/python; failed=; \
	$$python -m tests.private_names --check || failed="$$failed names"; \
	$$python -m tests.private_names --features || failed="$$failed features"; \
	$$python -m pytest -q -n $(JOBS) --dist worksteal \
		-m 'not slow and not integration and not without_jax' $(ARGS) \
		$$($$python -m tests.private_names --rings) || failed="$$failed tests"; \
	if [ -n "$$failed" ]; then echo "jax $(JAX) failed:$$failed"; exit 1; fi

.venv-jax-%/.installed: pyproject.toml
	@interpreter=$$(.ci/find-python $(PYTHON_WANTED)); \
	echo "Making .venv-jax-$* with $$($$interpreter --version)"; \
	$$interpreter -m venv --clear .venv-jax-$*
	@.venv-jax-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		'jax[tpu]==$*' $(patsubst %,'%',$(filter-out jax%,$(needed))) \
		pytest pytest-timeout pytest-xdist hypothesis cloudpickle jsonschema optax
	@touch $@

.PHONY: docs
docs: $(documenting) browser ## Build the documentation into site/ and test it in a browser
	$(mkdocs) build --strict
	$(python) -m pytest -q tests/site $(ARGS)

.PHONY: docs-serve
docs-serve: $(documenting) ## Serve the documentation on http://127.0.0.1:8000 and rebuild it on changes
	$(mkdocs) serve

.PHONY: preflights
preflights: $(developing) ## Compile configs/ and keep the facts in benchmarks/ (NAMES=...)
	$(python) -m benchmarks._preflights $(NAMES)

.PHONY: lint
lint: $(developing) ## Run ruff and pyright
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright --pythonpath $(python)

.PHONY: format
format: $(developing) ## Format the code with ruff
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

.PHONY: bench
bench: $(developing) ## Run all benchmarks (about 14 minutes), or BENCHMARKS; keep their figures
	mkdir -p bench-results
	failed=; \
	for name in $(BENCHMARKS); do \
		rm -f bench-results/$$name.json; \
		$(python) -m benchmarks.$$name --json bench-results/$$name.json $(ARGS) \
			|| failed="$$failed $$name"; \
	done; \
	$(python) -m benchmarks._page bench-results $(BENCHMARKS); \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

.PHONY: bench-growth
bench-growth: ## Compare costs with JAX's as work grows (under 10 minutes; ARGS="--rounds 5")
	@$(MAKE) --no-print-directory bench BENCHMARKS="$(growth_benchmarks)"

.PHONY: bench-auto
bench-auto: $(developing) ## Compare automatic shardings with layouts by hand (ARGS="--programs vit")
	$(python) -m benchmarks.auto $(ARGS)

.PHONY: bench-gpu bench-tpu
bench-gpu: ## Measure this machine's GPU beside its predictions (ARGS=--rehearse anywhere)
bench-tpu: ## Measure the TPUs of this VM's slice beside their predictions (ARGS=--rehearse anywhere)
bench-gpu bench-tpu: $(developing)
	$(python) -m benchmarks.device $(@:bench-%=%) $(ARGS)

.PHONY: wheel
wheel: $(developing) ## Build the wheel and the sdist into dist/
	rm -rf dist
	$(python) -m hatchling build -d dist

# The working tree may hold files that a commit lacks, and packages that are not required.
.PHONY: release-check
release-check: ## Check in a clean clone what a release needs (about an hour)
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	git clone --quiet . "$$folder"; \
	$(MAKE) --no-print-directory -C "$$folder" release-steps

.PHONY: release-steps
release-steps: $(developing)
	$(python) -m tests.release
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory docs
	$(pytest) tests/benchmarks tests/test_docs.py tests/test_budgets.py
	$(pytest) -m integration tests/test_wheel.py tests/test_docs.py
	$(MAKE) --no-print-directory test
	$(MAKE) --no-print-directory test-oldest
	$(MAKE) --no-print-directory check-jax

.PHONY: clean
clean: ## Remove the virtual environments and everything that the tools cache
	rm -rf .venv .venv-oldest .venv-torch .venv-jax-* bench-results dist
	rm -rf .pytest_cache .ruff_cache .hypothesis

$(VENV)/pyvenv.cfg: .python-version .ci/find-python
	@interpreter=$$(.ci/find-python $(PYTHON_WANTED)); \
	echo "Making $(VENV) with $$($$interpreter --version)"; \
	$$interpreter -m venv --clear $(VENV)

$(VENV)/.installed-%: $(VENV)/pyvenv.cfg pyproject.toml $(CONSTRAINTS)
	@echo "Installing xlashard and what it needs into $(VENV) (some minutes the first time)"
	@$(install) '.[$(subst _,-,$(subst -,$(comma),$*))]'
	@touch $@
