"""Start ranks on this machine, monitor them, and restart them when one has failed.

launch            run a function on ranks, and restart it after a failure
rank_processes    the processes of one attempt, from their start until all have ended
attempt           the outcome of one attempt, and which ranks failed
rank_main         the main function of a rank's process
pickling          pickle the function and its arguments
pipe_store        the rendezvous store, reached through inherited pipes only
forkserver        the process that ranks are forked from
forkserver_child  code in that process that ends it together with its program
"""
