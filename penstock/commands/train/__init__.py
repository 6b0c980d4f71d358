"""The main job: a model cut over ranks learns real data, and is compared with one process.

`command`    the command: from what was typed to the job
`config`     its options, checked before anything is started
`data`       bytes of text, or images of digits
`job`        what every rank does, from its setup to the run's results
`again`      a run that begins again, with the ranks that there are
`memory`     a folder in memory for a checkpoint after each step
`planned`    --plan: what to run, from the layers' measured costs
`setup`      what a rank trains: data, model, optimizer
`evaluation` the loss on what was held out, and text the model goes on with
`metrics`    every step as a line of JSON, and for TensorBoard
`result`     what a training came to
`progress`   what is printed, while it runs and at its end
"""
