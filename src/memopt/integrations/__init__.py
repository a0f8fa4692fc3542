"""Other people's trainers: callbacks and plugins that call `memopt.patch` before the model is wrapped.

Nothing here is imported before it is asked for: `trainer.py` imports transformers' Trainer, `lightning.py` Lightning.
"""
