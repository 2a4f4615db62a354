# Everything runs from .venv, which is made and filled on first use.
#   PYTHON=python3.12     the Python to make it from (3.11 or newer)
#   PIP_FLAGS=...         more options for pip. On a machine without a GPU a smaller torch does:
#                         make grade PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'
#   ARGS=...              passed on: make test ARGS='task4 -x'

PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install $(PIP_FLAGS)

# Where there is a GPU: what tells its driver, and the CUDA compiler from PyPI if there is no other.
EXTRAS = $(shell if nvidia-smi -L 2>/dev/null | grep -q GPU; then echo gpu; command -v nvcc >/dev/null 2>&1 || echo cuda; fi)

# A list that pip reads, from the one list that there is.
requirements = $(PY) -c 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	base = p["dependencies"] if "base" in sys.argv else []; \
	extras = p["optional-dependencies"]; \
	print(*base, *(r for e in sys.argv[1:] for r in extras.get(e, [])), sep="\n")'

CPP_FILES = $(shell find common task* -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp')

.PHONY: help grade test ladder format lint cuda-compiler clean
.DELETE_ON_ERROR:

help:
	@echo 'make grade    build, check, time and grade all seven tasks; fills Results.md'
	@echo 'make test     all tests, with pytest'
	@echo 'make ladder   build, check and time the ladder of attention kernels; fills its README.md'
	@echo 'make lint     check style (ruff, clang-format);  make format  fix it'
	@echo 'make clean    remove what was built; .venv stays'

grade: .venv/installed
	@$(PY) -m common.grade $(ARGS)

test: .venv/installed
	@$(PY) -m pytest $(ARGS)

# With the picture: matplotlib is installed for this alone.
ladder: .venv/installed-plot
	@$(PY) -m task4.ladder $(ARGS)

lint: .venv/installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@test -z '$(CPP_FILES)' || .venv/bin/clang-format --dry-run -Werror $(CPP_FILES)
	@test -z '$(CPP_FILES)' || awk 'length > 120 {print FILENAME ":" FNR ": over 120 characters"; wide = 1} END {exit wide}' $(CPP_FILES)

format: .venv/installed-dev
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	@test -z '$(CPP_FILES)' || .venv/bin/clang-format -i $(CPP_FILES)

# The CUDA compiler from PyPI, on any machine.
cuda-compiler: .venv/installed-cuda

clean:
	rm -rf .build .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# The stamps are written last, so an interrupted installation is taken up again.
.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo 'Python 3.11 or newer is needed; $(PYTHON) is not. Try: make PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { echo "Could not make .venv with $(PYTHON). On Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }
	@echo 'Installing the requirements into .venv (once; torch is large) ...'
	@$(requirements) base $(EXTRAS) > .venv/requirements.txt
	@$(PIP) -r .venv/requirements.txt
	@touch $@

.venv/installed-%: .venv/installed pyproject.toml
	@$(requirements) $* > .venv/requirements-$*.txt
	@$(PIP) -r .venv/requirements-$*.txt
	@touch $@
