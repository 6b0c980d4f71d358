"""What a stage exchanges with other stages, and what its forward is called with for it.

`neighbours`      which stages are connected to which, and which parameters they share
`messages`        what comes from them and goes to them: values, and the parameters that stages share
`sharing`         which of the values share memory, so that no stage may change them in place
`arguments`       what of that the module's forward is called with, and the keywords that ride along
"""
