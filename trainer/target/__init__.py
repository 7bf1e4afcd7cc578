"""The frozen target model and its hidden states."""
