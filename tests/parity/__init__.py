"""Comparison with transformers' DiffusionGemma on small random checkpoints, in fp32 on the CPU."""
