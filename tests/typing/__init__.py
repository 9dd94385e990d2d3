"""Code of users, checked by mypy and never run."""
