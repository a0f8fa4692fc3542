"""The one way in which memopt describes how to recompute a tensor: an expression (docs/recompute.md).

`expression`: a first value, computed from tensors that are saved anyway, and the steps from it to the tensor;
`rules`: kinds of autograd nodes whose output can be a first value; `operations` registers PyTorch's own operations;
`chains`: elementwise operations of a forward, followed back to the tensors that they begin with;
`graph` and `calls`: record steps from the autograd graph, and from the functions that a module's forward calls;
`versions`: tests whether a tensor was changed in place;
`specs`: for readers whose own autograd function saves the inputs of an expression; they share a recomputed output;
`memopt.saved`: for all other readers, which save a handle inside a scope.
"""
