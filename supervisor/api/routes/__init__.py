"""One module per resource of the public API."""
