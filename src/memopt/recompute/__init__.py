"""How memopt says 'compute this tensor again', in one way: an expression (docs/recompute.md).

`expression` is what is said: a first value, made of tensors that are saved anyway, and steps from there on;
`rules` says of which nodes of the autograd graph the output can be a first value, `operations` registers PyTorch's own;
`chains` follows the elementwise operations of a forward back to what they begin with;
`graph` and `calls` record steps: from the autograd graph, and from the functions that a module's forward calls;
`versions` tells whether a tensor was changed in place;
`specs` serves readers that save the inputs by their own autograd function; all readers share a recomputed output;
`memopt.saved` serves all others: inside a scope they save a handle;
`weights` are sums of a weight and an adapter's product.
"""
