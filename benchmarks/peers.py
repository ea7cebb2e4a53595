"""What others' engines take at LLaDA-8B's shape on one H200: milliseconds and gigabytes at batch 1, 8 and 32.

Random weights in bf16, prompts of 700 tokens and 256 response positions, median of 21 iterations: the release of the
authors of Flash-dLLM (PyTorch 2.11, Triton 3.6; block length 16, 64 tracked and 64 masked rows, 32 verified ones) and
Fast-dLLM's dual cache (block length 32).
"""

BATCHES = (1, 8, 32)
RELEASE = {
    "iteration": (40.5, 72.6, 274.0),
    "draft": (20.3, 45.0, 177.0),
    "verify": (17.9, 17.3, 49.7),
    "prefill": (64.0, 383.0, 1555.0),  # of 1,024 rows a sequence
    "memory": (16.9, 22.8, 42.9),  # at its peak
}
FAST_DLLM = {
    "block": (43.7, 42.6, 123.0),
    "prefill": (54.0, 248.0, 1030.0),  # a full pass, at each block's start
    "memory": (18.8, 37.5, 101.8),
}
