"""Messages between stages: sent without waiting, into receives posted early, and described only if they are not as before.

channels          the messages from one rank to a neighbour, in order, over a transport
memory_transport  between two processes of one machine, through shared memory
group_transport   through process groups: between machines, between GPUs
message_spec      the description of a message: its tree, and shapes and layouts of its tensors
spec_cache        the specs of earlier messages, by which receives are posted before a message arrives
shared_memory     memory that two processes share, and the allocation of blocks in it
send_thread       a thread that sends while the rank computes, and its first error
"""
