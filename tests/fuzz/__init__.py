"""Values that visitors and strangers choose, made by Hypothesis; see ``tests/README.md``."""
