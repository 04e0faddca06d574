# Needs GNU make >= 3.81 and Python >= 3.11, nothing else. `make help` lists the targets.
#   make demo VENV=/elsewhere/venv    another environment     make demo PYTHON=/path/to/python3    another Python
#   make demo BACKEND=cpu             another MLX backend     make test TESTS=tests/test_cli.py    some tests only

VENV ?= .venv
NOTEBOOK ?= examples/01_quickstart.ipynb
TESTS ?=
BIN = $(VENV)/bin

export BACKEND PYTHON

.PHONY: help demo lab test check frontend browser bench wheel clean

help:
	@echo "make demo      run the quickstart notebook on a real model and show each answer as it comes"
	@echo "make lab       open the example notebooks in JupyterLab"
	@echo "make test      lint, type check and the whole test suite"
	@echo "make check     lint, type check and the unit tests of the front end only"
	@echo "make frontend  build the widgets and the JupyterLab extension, where JupyterLab finds it"
	@echo "make browser   find a Chromium for the browser tests, or fetch one; asks first"
	@echo "make bench     the benchmarks against mlx-lm on this machine's CPU, into benchmark-output/ (half an hour; keep it quiet)"
	@echo "make wheel     build the wheel and the source archive into dist/"
	@echo "make clean     remove what the other targets made, except the environment $(VENV)"

# `make demo` shows plain HTML and so does without the front end and node.
# One stamp per set of packages: an environment is installed into again only when pyproject.toml has changed.
$(VENV)/.installed-lab: pyproject.toml scripts/setup.sh
	@sh scripts/setup.sh install "$(VENV)" lab
	@touch "$@"

$(VENV)/.installed-dev: pyproject.toml scripts/setup.sh
	@sh scripts/setup.sh install "$(VENV)" dev
	@touch "$@"

demo: $(VENV)/.installed-lab
	@"$(BIN)/mlxnb" demo "$(NOTEBOOK)"

lab: $(VENV)/.installed-lab
	@sh scripts/setup.sh frontend "$(VENV)"
	@echo "mlxnb: opening JupyterLab on examples/ (Ctrl-C twice ends it)"
	@"$(BIN)/jupyter" lab examples

# One process has one BLAS: a run on MLX's own, which is exact, and with MKL here, one in each of its two modes.
test: check browser
	@failed=0; modes=none; \
	if "$(BIN)/python" -m pip show --quiet mkl 2>/dev/null; then modes="none mkl-strict mkl"; fi; \
	for mode in $$modes; do \
		echo "mlxnb: tests, BLAS $$mode"; \
		"$(BIN)/python" -m pytest --blas $$mode $(TESTS); status=$$?; \
		if [ -n "$(TESTS)" ] && [ $$status -eq 5 ]; then status=0; fi; \
		if [ $$status -ne 0 ]; then failed=1; fi; \
	done; \
	exit $$failed

check: frontend
	@echo "mlxnb: ruff"
	@"$(BIN)/ruff" check .
	@echo "mlxnb: mypy"
	@"$(BIN)/mypy"
	@"$(BIN)/python" scripts/frontend.py check

# Builds what has changed only: a hash of the sources is kept in build/frontend.
frontend: $(VENV)/.installed-dev
	@sh scripts/setup.sh frontend "$(VENV)"

browser: $(VENV)/.installed-dev
	@PYTHON="$(BIN)/python" sh scripts/chromium.sh get $(if $(CI),--yes) >/dev/null

bench: $(VENV)/.installed-dev
	@"$(BIN)/python" engine/benchmarks/run.py

wheel: $(VENV)/.installed-dev
	@echo "mlxnb: building the wheel and the source archive"
	@"$(BIN)/python" -m build --outdir dist

clean:
	rm -rf build dist demo-output test-output labextension/dist widgets/mlxnb_widgets/static .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./.venv*" -prune -exec rm -rf {} +
