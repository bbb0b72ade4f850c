"""Profiles of the property tests: ``ci`` by default, ``pytest --hypothesis-profile thorough`` before a release."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadlines: the machines that run this are shared, and a slow example is no failure.
settings.register_profile("ci", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("ci"), max_examples=300)
settings.load_profile("ci")
