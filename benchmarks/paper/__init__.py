"""The tables and figures of Flash-dLLM (arXiv 2609.26796), each a command: python -m benchmarks.paper.table1

With `--model PATH --data FOLDER` on the paper's benchmarks, else on the synthetic tasks of the small checkpoint.
"""
