"""Tables, engine, the one writer, and read queries."""
