"""A training step, traced from the config alone: what is saved, allocated, freed and computed, and why."""
