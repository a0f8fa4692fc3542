"""Tests of the callbacks and plugins for other people's trainers that need no more than transformers."""
