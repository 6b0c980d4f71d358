"""Examine this machine: devices, backends, and how fast steps and messages are.

`machine_commands`       the commands and their options
`doctor`                 devices, backends, message times and missing extras
`steps_benchmark`        a training step on emulated devices compared with the simulator, and the engine's own time
`collectives_benchmark`  torch's collectives over sizes: latency, bandwidth, a table and a plot
"""
