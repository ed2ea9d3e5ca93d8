.PHONY: setup check test docs generated results locks bench demo

setup:  ## install astuner with everything that developers need
	pip install -e ".[dev]"

check:  ## lint, format, types, import contracts
	ruff check astuner tests bench campaigns tutorial docs .ci
	ruff format --check astuner tests bench campaigns tutorial docs .ci
	mypy
	lint-imports

test:  ## the test suite
	pytest -n 3

docs:  ## build the documentation site in site/; needs `pip install -e ".[docs]"`
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

generated:  ## write the default YAML and the docs' key tables from the configuration's declarations
	python -m docs.key_tables docs/en
	python -m docs.algorithm_tables docs/en/algorithms.md

results:  ## write the page of the published results and its pictures from docs/results
	python -m astuner.analysis.benchmark.report docs

locks:  ## resolve the lock files of the backbones' environments again; ARGS="--upgrade verl-cpu" selects which and how
	python .ci/locks.py $(ARGS)

bench:  ## print one line of JSON for each benchmark; needs `pip install -e ".[dev,bench]"`
	python bench/bench_engine.py
	python bench/bench_step.py
	python bench/bench_merge.py
	python bench/bench_update.py
	python bench/bench_debug.py
	python bench/bench_gateway.py
	python bench/bench_rescore.py
	python bench/bench_memory.py --cases tiny tiny_lora
	python bench/bench_sync.py --cases tiny

demo:  ## tune the tiny math agent
	astuner --conf tutorial/example_math_agent/math_agent_tiny.yaml
