"""The documentation, and the programs that write its generated pages (`make docs`)."""
