PYTHON ?= python3
BIN := .venv/bin
AXE_VERSION := 4.14.0
# one thread in each process; compiled tests are kept, also where the environment says not to
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test docs docs-links pictures test-docs test-federation test-package test-browser test-device lint types types-platforms bench clean

demo: .venv/demo  ## train on the embedded digits over clients of five sizes
	$(BIN)/fedquilt train

test: .venv/test lint types  ## everything that must hold; CONTRIBUTING.md lists what the other targets add
	$(PYTEST) -n auto --dist worksteal

docs: .venv/test  ## the documentation site: build/docs/html/index.html, with all links checked
	OMP_NUM_THREADS=1 $(BIN)/python tools/build_docs.py

docs-links: .venv/test  ## as docs, and asks the network whether the pages of other sites exist
	OMP_NUM_THREADS=1 $(BIN)/python tools/build_docs.py --links

pictures: .venv/test  ## drawings and screenshots of the docs, from real runs
	$(BIN)/python tools/draw_methods.py
	$(BIN)/python tools/screenshots.py

test-docs: .venv/test  ## commands and code blocks of README and docs/ as typed, and benchmarks; an hour
	$(PYTEST) -m docs tests/test_docs.py tests/test_benchmarks.py

test-federation: .venv/test  ## runs on Flower for real: every method, and what may go wrong; half an hour
	$(PYTEST) -m federation tests/deploy

test-package: .venv/test  ## wheel and sdist, built, installed into fresh environments and used; two minutes
	$(PYTEST) -m 'package or not package' tests/test_package.py

test-browser: .venv/test .venv/axe/axe.min.js  ## pages in a real Chromium; it is installed if that is possible
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  (apt-get update -q && apt-get install -y -q chromium chromium-driver) || \
	  echo "chromium could not be installed; the tests will be skipped"
	$(PYTEST) -m 'browser or not browser' tests/browser

.venv/axe/axe.min.js: | .venv/bin/python
	mkdir -p .venv/axe
	cd .venv/axe && npm pack --silent axe-core@$(AXE_VERSION) && \
	  tar -xzf axe-core-$(AXE_VERSION).tgz --strip-components=1 package/axe.min.js || \
	  echo "axe-core could not be fetched; pages are tested without it"

test-device: .venv/test  ## the laws of devices on a real one: make test-device DEVICE=cuda:0
	FEDQUILT_DEVICE=$(DEVICE) $(BIN)/python -m pytest -n 0 -o addopts=--import-mode=importlib tests/laws/device_laws.py

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: .venv/test
	$(BIN)/mypy

types-platforms: .venv/test  ## types as they are on macOS and Windows
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 src
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin src

bench: .venv/test  ## speed and memory, against a bare PyTorch loop
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/merge.py
	$(BIN)/python benchmarks/robust.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[onnx]'
	touch $@

.venv/test: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@ .venv/demo

clean:
	rm -rf .venv build runs
