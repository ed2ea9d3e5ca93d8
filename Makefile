.PHONY: setup check test locks bench demo

setup:  ## install astuner with everything that developers need
	pip install -e ".[dev]"

check:  ## lint, format, types, import contracts
	ruff check astuner tests tutorial .ci
	ruff format --check astuner tests tutorial .ci
	mypy
	lint-imports

test:  ## the test suite
	pytest

locks:  ## resolve the lock files of the backbones' environments anew; ARGS="--upgrade verl-cpu" says which and how
	python -m astuner.launcher.environments.locking $(ARGS)

bench:  ## print one JSON line a benchmark; needs `pip install -e ".[dev,bench]"`
	python tests/bench/bench_engine.py
	python tests/bench/bench_step.py
	python tests/bench/bench_merge.py
	python tests/bench/bench_update.py
	python tests/bench/bench_debug.py

demo:  ## tune the tiny math agent
	astuner --conf tutorial/example_math_agent/math_agent_tiny.yaml
