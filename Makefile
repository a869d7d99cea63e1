# Two commands: `make demo` runs the main job, `make test` runs everything CI runs.
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo learn test lint types unit sanitize campaign faults model soak clean

demo: $(READY)
	$(PYTHON) -m shmcollect run CartPole-v1 --frames 1_000_000

learn: $(READY)
	$(PYTHON) examples/ppo_cartpole.py --seeds 0 1 2 3 4 --plot ppo_cartpole.png

test: lint types sanitize unit

$(READY): setup.cfg setup.py constraints.txt $(wildcard shmcollect/*.c shmcollect/*.h)
	@command -v $${CC:-cc} >/dev/null || { echo "shmcollect has a small C core: install a C compiler (e.g. apt install gcc)" >&2; exit 1; }
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "shmcollect needs Python 3.11 or later" >&2; exit 1; }
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install -q -c constraints.txt -e '.[envs,bench,dev]'
	touch $@

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(READY)
	$(PYTHON) -m mypy

unit: $(READY)
	$(PYTHON) -m pytest -m 'not campaign'

campaign: $(READY)
	$(PYTHON) -m pytest -m campaign

model: $(READY)
	$(PYTHON) tests/protocol/check_models.py

faults: $(READY)
	$(PYTHON) -m tests.faults --seconds 600 --seed 0

soak: $(READY)
	$(PYTHON) -m tests.soak --minutes 30

sanitize: $(READY)
	./tests/native/sanitize $(PYTHON)

clean:
	rm -rf $(VENV) build *.egg-info shmcollect/*.so
