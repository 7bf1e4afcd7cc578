"""Training state and exported drafters on disk."""
