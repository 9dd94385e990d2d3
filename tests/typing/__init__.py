"""User code, checked by mypy and never run."""
