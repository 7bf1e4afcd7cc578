"""Signals, status record, exit codes."""
