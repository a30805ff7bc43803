# The habits of this project in four words. Everything runs through uv.
.PHONY: check format test build

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

build:
	uv build
