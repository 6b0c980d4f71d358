"""The one door to torch's private parts: each function says what it needs of torch and which public call would do, if any.

Nothing else in the package touches a private name of torch (a test looks). What differs between the releases that are
supported, 2.11 to 2.15, is decided here and nowhere else.
"""

# ---- trees of values ------------------------------------------------------------------------------------------------

# ---- modules and tensors --------------------------------------------------------------------------------------------

# ---- autograd -------------------------------------------------------------------------------------------------------


# ---- process groups (comms) -----------------------------------------------------------------------------------------

# ---- graphs and exports (partition) ---------------------------------------------------------------------------------

# ---- DistributedDataParallel and fully_shard (mesh) -----------------------------------------------------------------
