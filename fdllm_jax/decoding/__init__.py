"""The decode loop and the methods that run in it."""
