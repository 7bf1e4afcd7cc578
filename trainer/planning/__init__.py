"""Predicts what a configuration needs, before anything is loaded."""
