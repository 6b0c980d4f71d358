"""When every action runs or ran, why a rank waits, and what another table would take.

`events`       the events of a step, and what is read off them one by one
`causes`       why a rank is idle, and the chain that makes the step as long as it is
`timeline`     events with their causes and their memory: one record for planned and measured
`simulate`     costs, when every action runs at these, and when replicas have averaged their gradients
`measurement`  what the actions of a measured step cost, and any other table at these costs
`replay`       a measured step with shorter actions and faster messages
`explanation`  what is said of a step, in numbers and in words
`explain`      where a measured step's time went, and what would make it shorter
"""
