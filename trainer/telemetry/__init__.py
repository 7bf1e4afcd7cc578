"""Metric records and their sinks; never imports torch."""
