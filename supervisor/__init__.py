"""The control daemon, its API and its CLI. Never imports `trainer`; the two halves meet in files only."""
