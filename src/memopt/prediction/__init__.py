"""Predict the peak of a whole training step, with optimizer and allocator, from the config alone."""
