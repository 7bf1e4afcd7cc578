"""Prompts to training samples to batches."""
