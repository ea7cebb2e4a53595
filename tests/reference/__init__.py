"""The PyTorch reference that the package is checked against. It shares no code with it."""
