"""Benchmarks of the engine and the training of its small checkpoint."""
