# make demo: the main job at its tiny default, on a CPU. make test: lint, types, tests.
# make contracts: compute the committed contracts anew, after a change that is meant to move bits.

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

# A Python >= 3.12: on PATH, else pyenv's, else one that uv fetches. Each candidate is run, since a
# version manager may leave names on PATH that do not start.
define FIND_PYTHON
works() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }; \
for p in python3.12 python3.13 python3 "$$HOME"/.pyenv/versions/3.12*/bin/python \
         "$$HOME"/.pyenv/versions/3.13*/bin/python; do \
  if works "$$p"; then echo "$$p"; exit 0; fi; \
done; \
uv=$$(command -v uv) || { python3 -m venv $(VENV)-uv && $(VENV)-uv/bin/pip install -q uv && uv=$(VENV)-uv/bin/uv; } >&2; \
"$$uv" python install 3.12 >&2 && "$$uv" python find 3.12
endef

.PHONY: demo test lint contracts clean

demo: $(READY)
	$(PYTHON) experiments/dapo_qwen.py $(ARGS)

test: $(READY) lint
	$(PYTHON) -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

contracts: $(READY)
	$(PYTHON) -m isojax.contract build --config configs/tiny.toml --mesh 1x1 \
	  -o configs/tiny.contract.json
	$(PYTHON) -m isojax.contract build --config configs/qwen3_5_35b_a3b.toml --platform cuda \
	  --device sm_90 --mesh 1x1 --mesh 8x1 -o configs/qwen3_5_35b_a3b.contract.json

$(READY): pyproject.toml constraints.txt
	python=$$($(FIND_PYTHON)) && "$$python" -m venv $(VENV)
	$(PYTHON) -m pip install -q -c constraints.txt -e '.[data,report,test]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-uv .jax_cache
