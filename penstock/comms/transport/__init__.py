"""Messages between stages: sent without waiting, received into posted receives, described once and then only their bytes.

channels          the messages from one rank to a neighbour, in order, over a transport
memory_transport  between two processes of one machine: memory that both see, and how the two ends find each other
group_transport   over process groups: between machines, between GPUs
message_spec      the description of a message: a tree of tensors, their shapes and layouts
shared_memory     memory that two processes see, and blocks in it
send_thread       a thread that sends while the rank computes, and the first error of it
"""
