"""Trace a training step from the config alone: its saved tensors, its allocations and frees, and its operations."""
