"""Loads the shared fixtures and sets what holds for every test; all else belongs beside its tests."""

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.fixtures"]

# a loaded machine takes longer for an example than hypothesis allows by itself: that says nothing of the code
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
