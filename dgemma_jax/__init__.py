"""DiffusionGemma in JAX."""
