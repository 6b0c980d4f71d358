"""The backward of a stage, whole or in two: `I` gives the input's gradient, `W` computes the weights' gradients later.

In the forward, stand-ins take the parameters' places. An operation that has a rule leaves a formula for each use of a weight.

`autograd_edges`  where a stage's autograd graph begins and ends: captured input gradients, edges that a backward starts at
`parameter_slot`  the places of a parameter in a module, and its temporary replacement there
`split`           `W`: add the sum of its gradients to every parameter; which gradients are worth deferring
`standins`        the tensors that replace the parameters and send operations to their rules
`rules`           a rule for each operation, and the formula of its weight's gradient
`deferred`        the deferred gradients of one microbatch: for each use of a weight the saved input and the formula
`weight_gradients` which parameters get their gradients together in `W`, and in what order those are summed
"""
