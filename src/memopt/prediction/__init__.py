"""Whether a training step fits: the peak of a whole step, optimizer and allocator included, from the config alone."""
