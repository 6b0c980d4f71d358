"""What a step takes against what its table says, and how fast the collectives are.

`command`       the command: from what was typed to what is measured
`steps`         a step on emulated devices beside the simulator, and what the engine costs
`collectives`   every collective over sizes, beside torch's own: tables and plots
`timing`        what every rank runs to time one: variants in turns, after a barrier
"""
