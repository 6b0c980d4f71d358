"""What this machine offers, and how fast it is.

`command`       the commands and their options
`doctor`        devices, backends, message times and missing extras
`steps`         a training step on emulated devices against the simulator, and the engine's own time
`collectives`   torch's collectives over sizes: latency, bandwidth, a table and a plot
"""
