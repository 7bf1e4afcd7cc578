"""The DFlash target/drafter training pipeline. Knows nothing of the supervisor."""
