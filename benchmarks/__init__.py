"""What the supervisor costs, beside the bare commands, in one run: `python -m benchmarks`."""
