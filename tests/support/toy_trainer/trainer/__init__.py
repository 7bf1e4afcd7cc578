"""A trainer's outside without its inside: flags, status and metrics files, checkpoints, stop protocol."""
