# Everything runs from .venv, which is created and filled on first use.
#   PYTHON=python3.12     the Python to create it from (pyproject.toml has the range)
#   PIP_FLAGS=...         more options for pip. A machine without a GPU can take a smaller torch:
#                         make grade PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'
#   ARGS=...              passed on: make test ARGS='task4 -x'

PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install $(PIP_FLAGS)
OLDEST := $(shell sed -n 's/^requires-python = ">=3\.\([0-9]*\).*/\1/p' pyproject.toml)

# Where there is a GPU: what tells its driver, and the CUDA compiler from PyPI if there is no other.
EXTRAS = $(shell if nvidia-smi -L 2>/dev/null | grep -q GPU; then echo gpu; command -v nvcc >/dev/null 2>&1 || echo cuda; fi)

# Requirements that pip reads, from pyproject.toml: "pinned", or the names of extras.
requirements = $(PY) -c 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
	lists = p["project"]["optional-dependencies"] | p["tool"]["course"]; \
	print(*(r for name in sys.argv[1:] for r in lists[name]), sep="\n")'

# Ends with a sentence where a Python cannot be started: it was removed, or is a stub that finds none.
starts = $1 -c '' 2>/dev/null || { echo '$1 does not start. $2'; exit 1; }
VENV_STARTS = @$(call starts,$(PY),Remove .venv and run make again.)

.PHONY: help grade test report web doctor cuda-compiler clean
.DELETE_ON_ERROR:

help:
	@echo 'make grade    build, check, time and grade all seven tasks; fills in Results.md'
	@echo 'make test     run all tests with pytest'
	@echo 'make report   arithmetic intensity, times and a roofline of your kernels; writes report/'
	@echo 'make web      task 7 in the browser: GPT-2 on your kernels beside the attention of Hugging Face'
	@echo 'make doctor   what this machine lacks, and what to do about it'
# BEGIN STAFF
	@echo 'make ladder   build, check and time the ladder of attention kernels; fills in its tables'
	@echo 'make frontends  the same attention through Numba, Triton and others: install, check and time them'
	@echo 'make lint     check the style (ruff, clang-format);  make format  corrects it'
# END STAFF
	@echo 'make clean    remove what was built; keeps .venv'

grade: .venv/installed
	$(VENV_STARTS)
	@$(PY) -m common.grade $(ARGS)

test: .venv/installed
	$(VENV_STARTS)
	@$(PY) -m pytest $(PROCESSES) $(ARGS)

# matplotlib, which draws the pictures, is installed where it is needed only.
report: .venv/installed-plot
	@$(PY) -m common.report $(ARGS)

# So are the packages of the page.
web: .venv/installed-web
	@$(PY) -m task7.web $(ARGS)

# Also before anything is installed.
doctor:
	$(if $(wildcard .venv/installed),$(VENV_STARTS),@$(call starts,$(PYTHON),Try: make doctor PYTHON=python3.12))
	@$(if $(wildcard .venv/installed),$(PY),$(PYTHON)) -m common.doctor $(ARGS)

# BEGIN STAFF
.PHONY: ladder frontends format lint

# The whole course's tests take long: several processes share them, but no more than a GPU has memory for.
test: .venv/installed-dev
PROCESSES = -n auto --maxprocesses 4 --dist worksteal

CPP_FILES = $(shell find common task* -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp')

ladder: .venv/installed-plot
	@$(PY) -m task4.ladder $(ARGS)

# Their packages are installed for this target only.
frontends: $(patsubst %,.venv/installed-%,numba nvrtc triton cutile thunder)
	@$(PY) -m task4.frontends $(ARGS)

lint: .venv/installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@test -z '$(CPP_FILES)' || .venv/bin/clang-format --dry-run -Werror $(CPP_FILES)
	@test -z '$(CPP_FILES)' || awk 'length > 120 {print FILENAME ":" FNR ": over 120 characters"; wide = 1} END {exit wide}' $(CPP_FILES)

format: .venv/installed-dev
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	@test -z '$(CPP_FILES)' || .venv/bin/clang-format -i $(CPP_FILES)

# END STAFF
# The CUDA compiler from PyPI, on any machine.
cuda-compiler: .venv/installed-cuda

clean:
	rm -rf .build .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# The stamps are written last, so an interrupted installation is resumed.
.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, $(OLDEST)))' 2>/dev/null || \
	  { echo 'Python 3.$(OLDEST) or newer is needed; $(PYTHON) is older or does not start. Try: make PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { echo "Could not create .venv with $(PYTHON). On Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }
	@echo 'Installing the requirements into .venv (once; torch is large) ...'
	@$(requirements) pinned $(EXTRAS) > .venv/requirements.txt
	@$(PIP) -r .venv/requirements.txt
	@touch $@

.venv/installed-%: .venv/installed pyproject.toml
	@$(requirements) $* > .venv/requirements-$*.txt
	@$(PIP) -r .venv/requirements-$*.txt
	@touch $@
