# Two commands: `make demo` learns a policy over three live services; `make test` tests everything.
# Both set up the virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COVERAGE := --cov --cov-report=json:build/coverage.json --cov-report=term:skip-covered

# The tests start hundreds of processes: none of them shall compile the same sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: page-images demo extras test check lint types docs site audit sbom lock web clean

demo: $(VENV)/.installed
	$(BIN)/riffle up --preset demo --out runs/demo --force

# Where the node in TypeScript cannot be built, for instance without Node.js, its tests are skipped.
WEB := node_client/web
WEB_SOURCES := $(wildcard $(addprefix $(WEB)/,*.json *.mjs src/*.ts src/*/*.ts demo/*))

test: $(VENV)/.installed-dev
	@$(MAKE) --silent $(WEB)/dist/.built || echo "skipping the tests of $(WEB): it cannot be built here"
	$(BIN)/python -m pytest -n 4 --dist worksteal

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

types: $(VENV)/.installed-dev
	$(BIN)/mypy

check: lint types
	$(BIN)/python -m pytest -n 4 --dist worksteal $(COVERAGE)
	$(BIN)/python .ci/check_coverage.py build/coverage.json

$(VENV)/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	touch $@

$(WEB)/node_modules/.installed: $(WEB)/package-lock.json
	cd $(WEB) && npm ci --silent
	touch $@

$(WEB)/dist/.built: $(WEB)/node_modules/.installed $(WEB_SOURCES)
	cd $(WEB) && npm run --silent build
	touch $@

# The node in TypeScript: style, types and its own tests. `make test` has it fill batches.
web: $(WEB)/dist/.built
	cd $(WEB) && npm run --silent lint && npm test --silent

# All that is locked: what figures, tests and documentation need, and no service does.
extras: $(VENV)/.installed-dev

# Reference pages and test vectors that are made from the code; a test compares them.
docs: $(VENV)/.installed
	$(BIN)/python -m docs.reference
	$(BIN)/python -m docs.make_vectors

# The documentation as a site, in build/site; warnings are errors.
site: $(VENV)/.installed-dev
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site

# What is installed is what is locked, under licences we accept; needs no network.
audit: $(VENV)/.installed-dev
	$(BIN)/python .ci/audit_dependencies.py

# The bill of materials (CycloneDX) of what the services run on, in build/sbom.json.
sbom: $(VENV)/.installed-dev
	mkdir -p build
	$(BIN)/cyclonedx-py requirements requirements.lock --pyproject pyproject.toml \
	  --output-reproducible --validate -o build/sbom.json

# The pictures of docs/page.md, taken by the test of the page: real services, real Chromium.
page-images: $(VENV)/.installed-dev
	RIFFLE_PAGE_IMAGES=docs/images $(BIN)/python -m pytest tests/page/test_images.py

# Names, versions and hashes only: no addresses.
lock: $(VENV)/.installed-dev
	$(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --no-strip-extras \
	  --no-emit-index-url --no-emit-options --no-header --extra build \
	  --output-file requirements.lock pyproject.toml
	$(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --no-strip-extras \
	  --no-emit-index-url --no-emit-options --no-header --extra build --extra dev \
	  --output-file requirements-dev.lock pyproject.toml

clean:
	rm -rf $(VENV) $(WEB)/build $(WEB)/dist $(WEB)/node_modules build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
