"""`python -m supervisor` is `dflashctl`."""

from supervisor.cli import main

main()
