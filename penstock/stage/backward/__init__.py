"""The backward in two: `I` gives the input's gradient and keeps what `W` will compute the weights' gradients from.

In the forward, stand-ins take the parameters' places; an operation with a rule leaves, for each use of a weight, a formula.

`split`     `W`: every parameter is handed the sum of its gradients; which ones are worth being put off
`standins`  what takes the parameters' places, and sends operations to their rules
`rules`     a rule for each operation, and the formula of its weight's gradient
`deferred`  what one microbatch has put off: for each use of a weight the saved input and the formula
`groups`    which gradients are handed over together, and in what order they are summed
"""
