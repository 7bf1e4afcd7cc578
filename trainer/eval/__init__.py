"""Real speculative decoding against the target."""
