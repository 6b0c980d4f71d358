"""The main job: a model cut over ranks learns real data, and is compared with one process.

`command`    the command: checks what was typed and starts the job
`config`     its options
`data`       bytes of text, or images of digits
`job`        the work of every rank, from its setup to the run's results
`again`      restarts: the options for the ranks that are left
`memory`     a folder in memory for a checkpoint after each step
`planned`    --plan: measure the layers, plan, try the best plans
`setup`      data, model and optimizer of a rank
`evaluation` the loss on the held-out part, and a sample of text
`metrics`    a line of JSON for each step, and TensorBoard
`result`     the result of a training
`progress`   the output, while it runs and at its end
"""
