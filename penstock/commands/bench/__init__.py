"""What a step takes against what its table says, and how fast the collectives are.

`command`       the command: from what was typed to what is measured
`steps`         a step on emulated devices beside the simulator, and what the engine costs
`collectives`   every collective of torch over sizes: latency, bandwidth, a table and a plot
"""
