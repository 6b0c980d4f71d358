"""When every action runs or ran, why a rank waits, and what another table would take. Plain Python.

`events`         the events of a step, and what follows directly from them
`causes`         why a rank is idle, and the chain of events that decides how long the step takes
`timeline`       events with their causes and their memory: one record for simulated and measured steps
`costs`          the costs of actions, messages and activations
`simulate`       when every action runs at these, and when replicas have averaged their gradients
`list_schedule`  a table from a priority: which ready action a free rank runs first
`teacher_tables` a table with the forwards of a second, frozen model in its idle time
`teacher_stages` the ranks of its stages, and their costs
`measurement`    the costs of a measured step's actions, and predictions for other tables at these costs
`replay`         a measured step with shorter actions and faster messages
"""
