"""Ranks on this machine: started, monitored, and started again when one has failed.

launcher          runs a function on ranks, in as many attempts as it takes
rank_processes    the processes of one attempt: from their start until all have ended
attempt           what became of one attempt, and which ranks failed
rank_main         what the process of a rank runs
pickling          the function and its arguments as bytes
pipe_store        the store where the ranks meet, reached through inherited pipes only
forkserver        the process that ranks are forked from
forkserver_child  the code in that process which ends it with its program
"""
