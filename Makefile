# make demo   a real model learns on this machine, from examples and then from reward
# make test   every test but the slow ones, which .ci/run runs too
# make docs   the documentation as a site, in build/site
#
# All need Python 3.11 or later and a Python package index, and keep everything they install in .venv. On Linux the
# index's own torch brings CUDA along; without a GPU, spare yourself that download:
#     make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_FLAGS ?=
MARKS ?= not slow

# Tiny models are fastest on one thread. Tests that are compiled anew each time take eight seconds more in each process.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: demo test docs

demo: .venv/installed-demo
	.venv/bin/stovetop fetch smollm2
	.venv/bin/stovetop run sort_digits_demo

test: .venv/installed-test
	.venv/bin/stovetop fetch smollm2
	@echo "tests with marks: $(or $(MARKS),all)"
	$(TEST_ENV) .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m "$(MARKS)" $(PYTEST_FLAGS)

docs: .venv/installed-docs
	.venv/bin/python docs/site/build.py
	@echo "open build/site/index.html"

.venv/installed-demo: EXTRAS = gguf
.venv/installed-docs: EXTRAS = docs
.venv/installed-test: EXTRAS = gguf,dev
.venv/installed-%: pyproject.toml constraints.txt
	@echo "installing what is needed into .venv: some minutes the first time"
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_FLAGS) -e '.[$(EXTRAS)]'
	$(if $(findstring dev,$(EXTRAS)),.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_FLAGS) --no-deps tinker-cookbook)
	touch $@
