"""A patch in a folder of its own, as another project might bring one: x * sigmoid(1.702 x) kept as its input."""
