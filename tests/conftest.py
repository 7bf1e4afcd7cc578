"""Loads the shared fixtures; everything else belongs beside the tests that use it."""

pytest_plugins = ["tests.support.fixtures"]
