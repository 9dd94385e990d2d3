"""A shop that charges orders; the tests and the demonstration use it as an example."""
