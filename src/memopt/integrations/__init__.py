"""Callbacks and plugins for trainers: they call `memopt.patch` before the trainer wraps the model.

Each file is imported on its own, since `trainer.py` imports transformers' Trainer and `lightning.py` Lightning.
"""
