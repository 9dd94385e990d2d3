"""Measures django-dlock beside its floors and its peers; ``python -m benchmarks`` runs it."""
