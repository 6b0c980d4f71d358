"""`penstock train`: train a model cut over ranks on real data, and compare it with one process.

`train_command`    checks the options and starts the job
`config`           the options
`data`             bytes of text, or images of digits
`job`              the work of every rank, from its setup to the run's results
`restarts`         options for the ranks that are left after a failure
`memory_folder`    a folder in memory for a checkpoint after each step
`plan_option`      --plan: measure the layers, plan, try the best plans
`setup`            data, model and optimizer of a rank
`metrics`          a line of JSON for each step, and TensorBoard
`training_result`  the result of a training, its held-out loss and a sample of its text
`progress`         the output, while it runs and at its end
"""
