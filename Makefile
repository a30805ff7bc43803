# The habits of this project in a word each. Everything runs through uv.
.PHONY: check format test slow build docs lowest

check:
	uv run ruff check .
	uv run ruff format --check .
	uv run mypy
	uv run pytest

format:
	uv run ruff check --fix .
	uv run ruff format .

test:
	uv run pytest

# The long forms: kills, damaged configs, memory, every selector by every backend. An hour of a core.
slow:
	uv run pytest -m slow

build:
	uv build

# The site, into site/; warnings are errors.
docs:
	uv run --group docs zensical build --strict

# The earliest version that pyproject.toml allows of each direct dependency, in an environment of its own.
LOWEST = tests/test_partitions.py tests/test_partitions_qp.py tests/test_datasets_files.py \
	tests/test_features.py tests/test_models.py tests/test_report_archive.py tests/test_report_figures.py \
	tests/test_docs.py
lowest:
	uv venv --clear --python 3.11 build/lowest
	uv pip install --python build/lowest --resolution lowest-direct --group dev --editable '.[features]'
	build/lowest/bin/python -m pytest -n 2 -p no:cacheprovider $(LOWEST)
