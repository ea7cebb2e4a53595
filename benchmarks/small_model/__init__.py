"""The small checkpoint: its data, training and evaluation."""
