"""A plan as the configuration files of training engines. No engine is imported."""
