"""A shop that charges orders: what the tests and the demonstration guard."""
