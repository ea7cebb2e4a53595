"""Batch evaluation less the engine: tasks, their scores, the sandbox that runs generated code, results on disk."""
